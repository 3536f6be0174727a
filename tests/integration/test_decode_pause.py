# SPDX-License-Identifier: Apache-2.0
"""Pauses of a decode engine, and resets of its prefix cache, while KV is in flight, with vLLM's own scheduler.

A test does what vLLM's engine core does: it takes steps while the scheduler has work, and then empties the cache.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from harness.decode_scheduler import BLOCK, LONGEST, EngineScheduler
from vllm_ascend_pd.core.reasons import Reason

MakeScheduler = Callable[..., EngineScheduler]

pauses = pytest.mark.parametrize("pause", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL], ids=["wait", "keep"])
who_computes = pytest.mark.parametrize("who_computes", ["prefill", "never"])


@pytest.fixture
def make(make_any: MakeScheduler) -> Iterator[MakeScheduler]:
    made = []

    def make_scheduler(*args: Any, **of: Any) -> EngineScheduler:
        made.append(make_any(*args, caching=True, **of))
        return made[-1]

    yield make_scheduler
    for decode in made:
        decode.close()


@who_computes
@pauses
def test_a_pause_waits_for_transfers_and_then_empties_the_cache(
    make: MakeScheduler, pause: PauseState, who_computes: str
) -> None:
    decode = make(blocks=3 * LONGEST, who_computes=who_computes)
    for number, name in enumerate(("runs", "arrives", "is under way")):
        decode.add(name, 2 * BLOCK, first=1000 * number)
    decode.step()
    decode.arrives("runs")
    decode.step()
    decode.step()
    decode.vllm.set_pause_state(pause)
    for end in ("arrives", "is under way"):
        for _ in range(10):  # whoever was running has ended, or stands still
            decode.step()
        assert decode.vllm.has_requests(), "the engine is idle while prefill may write to its blocks"
        decode.arrives(end)
    decode.step()
    assert not decode.vllm.has_requests()
    assert decode.vllm.reset_prefix_cache(reset_running_requests=True)
    assert decode.free == decode.all_free, decode.state()
    decode.vllm.set_pause_state(PauseState.UNPAUSED)
    decode.run()
    assert decode.given_up == []


def test_a_pause_waits_for_the_transfers_of_requests_that_have_ended(make: MakeScheduler) -> None:
    """Mode "abort": a writer may be stopped, so the blocks are not free yet."""
    decode = make(blocks=LONGEST)
    decode.add("aborted", 2 * BLOCK)
    decode.step()
    decode.vllm.set_pause_state(PauseState.PAUSED_NEW)
    decode.abort("aborted")
    for _ in range(4):
        decode.step()
        assert decode.vllm.has_requests()
    decode.arrives("aborted")
    decode.step()
    assert not decode.vllm.has_requests()
    assert decode.vllm.reset_prefix_cache(reset_running_requests=True)


def test_a_reset_while_kv_is_in_flight_fails_and_preempts_nothing(make: MakeScheduler) -> None:
    decode = make(blocks=3 * LONGEST)
    runs = decode.add("runs", 2 * BLOCK, generates=8)
    decode.add("is under way", 2 * BLOCK, first=1000)
    decode.step()
    decode.arrives("runs")
    decode.step()
    decode.step()
    assert not decode.vllm.reset_prefix_cache(reset_running_requests=True)
    assert decode.vllm.running == [runs]
    decode.arrives("is under way")
    decode.step()
    assert decode.vllm.reset_prefix_cache(reset_running_requests=True)
    decode.run()


def test_kv_that_a_reset_took_back_is_not_compared_when_the_request_starts(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks hold what decode computes then."""
    decode = make(blocks=LONGEST)
    role, counted = decode.connector._role, []
    monkeypatch.setattr(role._issuer, "_verified_share", 1.0)
    monkeypatch.setattr(role._placement, "allocated", lambda _, by_decode, why=None: counted.append((by_decode, why)))
    decode.add("arrives", 2 * BLOCK)
    decode.step()
    decode.arrives("arrives")
    decode.step()
    assert decode.vllm.reset_prefix_cache(reset_running_requests=True)
    decode.run()
    assert decode.begun == []
    assert counted[-1] == (True, Reason.PREEMPTED)
