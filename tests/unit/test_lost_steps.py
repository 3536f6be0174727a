# SPDX-License-Identifier: Apache-2.0
"""Either side after steps that vLLM has lost: no request finds KV that they were to compute, and ranks hear again what
they may have missed, and report again what may not have reached the scheduler.

tests/simulation/test_lost_steps.py has both sides, with the sentinel of vLLM 0.33.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_grants import Rank
from vllm.v1.request import RequestStatus

from harness.decode_scheduler import METASERVER, SilentMetaserver
from harness.engines import Role
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, RealScheduler
from harness.scheduling import remembered
from harness.waiting import wait_until
from vllm_ascend_pd.connector import build
from vllm_ascend_pd.core.step import WorkerReport

PROMPT = range(100)


def lose_steps(scheduler: RealScheduler) -> None:
    """vLLM aborts all requests. No step is on its way any more."""
    scheduler.vllm.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    scheduler.connector.steps_lost()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=["prefill", "decode"])
def test_kv_that_a_lost_step_was_to_compute_is_not_found(role: Role, scheduled_model: Path) -> None:
    """vLLM caches a block when it schedules the step that fills it."""
    scheduler = RealScheduler(role, scheduled_model)
    scheduler.add("lost", PROMPT)
    scheduler.schedule()
    lose_steps(scheduler)
    for name, found in (("first", 0), ("second", len(PROMPT) // BLOCK * BLOCK)):
        request = scheduler.add(name, PROMPT)
        step = scheduler.schedule()
        assert request.prefill_stats.num_cached_tokens == found
        scheduler.end(step)
    scheduler.close()


class Decode:
    """A decode engine: vLLM's scheduler with this connector's, and the worker of its rank. No prefill engine writes."""

    def __init__(self, model: Path) -> None:
        self.rank = Rank()
        self.scheduler = RealScheduler(Role.DECODE, model)
        self._all_free = self.scheduler.pool.get_num_free_blocks()

    def add(self) -> None:
        self.scheduler.add("a", PROMPT, {"do_remote_prefill": True, "metaserver": METASERVER})

    def step(self) -> Any:
        """Takes a step. Returns what it tells the rank."""
        scheduled = self.scheduler.schedule()
        report, ended = self.hear(scheduled)
        self.scheduler.end(scheduled, report, finished_recving=ended)
        return scheduled.kv_connector_metadata.step

    def hear(self, scheduled: Any) -> tuple[WorkerReport | None, set[str]]:
        """The rank takes its part in a step. Returns what it reports, and the requests that have ended."""
        worker = self.rank.worker
        worker.start_step(scheduled.kv_connector_metadata.step)
        ended = worker.take_results().received
        return worker.take_report(), ended

    def gives_all_back(self) -> bool:
        """Takes a step. Returns whether all blocks are free after it."""
        self.step()
        return bool(self.scheduler.pool.get_num_free_blocks() == self._all_free)

    def close(self) -> None:
        assert not self.scheduler.vllm.requests
        assert remembered(self.scheduler.ours._role) == {}
        self.scheduler.close()
        self.rank.worker.close(5.0)


@pytest.fixture
def decode(scheduled_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    monkeypatch.setattr(build, "MetaserverClient", SilentMetaserver)
    made = Decode(scheduled_model)
    yield made
    made.close()


def test_a_ticket_that_the_rank_has_not_heard_of_ends(decode: Decode) -> None:
    decode.add()
    decode.scheduler.schedule()
    lose_steps(decode.scheduler)
    wait_until(decode.gives_all_back, 10)


def test_a_ticket_whose_cancellation_the_rank_has_not_heard_ends(decode: Decode) -> None:
    decode.add()
    assert len(decode.step().expects) == 1
    decode.scheduler.vllm.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert len(decode.scheduler.schedule().kv_connector_metadata.step.cancelled) == 1
    lose_steps(decode.scheduler)
    wait_until(decode.gives_all_back, 10)


def test_a_ticket_ends_whose_end_was_reported_in_a_lost_step(decode: Decode) -> None:
    decode.add()
    decode.step()
    decode.scheduler.vllm.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    ended: set[str] = set()

    def reports_the_end() -> bool:
        ended.update(decode.hear(decode.scheduler.schedule())[1])
        return bool(ended)

    wait_until(reports_the_end, 10)
    lose_steps(decode.scheduler)
    wait_until(decode.gives_all_back, 10)


def test_an_update_of_the_weights_that_was_reported_in_a_lost_step_is_reported_again(decode: Decode) -> None:
    """Otherwise the scheduler does not know it, and the rank grants nothing for tickets whose prompts are cached in
    part."""
    with decode.rank.worker._loaded.changing("update_weights"):
        pass
    report, _ = decode.hear(decode.scheduler.schedule())
    assert report is not None
    lose_steps(decode.scheduler)
    assert decode.step().weight_updates == {}
    assert decode.step().weight_updates == report.weight_updates != {}
