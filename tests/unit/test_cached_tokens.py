# SPDX-License-Identifier: Apache-2.0
"""What `usage` says of a prompt's cached tokens: those that no engine computed for the request. With vLLM's own
schedulers and requests."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engines import Role
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, RealScheduler
from harness.tickets import ticket_with
from vllm_ascend_pd.core.step import WorkerReport

PROMPT = 100
"""Six blocks of 16 and a part of one."""


@pytest.fixture
def prefill(scheduled_model: Path) -> Iterator[RealScheduler]:
    scheduler = RealScheduler(Role.PREFILL, scheduled_model, step_tokens=64)
    yield scheduler
    scheduler.close()


def ticket_id(scheduler: RealScheduler) -> str:
    """Of the request that was just added, or waits for KV again: its ticket is in one of the next steps."""
    for _ in range(3):
        step, _ = scheduler.step()
        if expects := step.kv_connector_metadata.step.expects:
            [expect] = expects
            return expect.ticket_id
    raise AssertionError("no ticket was issued")


def cached_tokens(outputs: list[Any]) -> int:
    [output] = outputs
    return output.prefill_stats.num_cached_tokens


def arrives(scheduler: RealScheduler, request_id: str, *ranks: WorkerReport) -> int:
    """The KV of a request is received: what it says is cached, with its first token."""
    report = ranks[0]
    for other in ranks[1:]:
        report = report.merge(other)
    scheduler.step(report, finished_recving={request_id})
    _, outputs = scheduler.step()
    return cached_tokens(outputs)


def received(ticket: str, cached: int) -> WorkerReport:
    return WorkerReport(received={ticket: (1000, 500)}, cached={ticket: cached})


def test_the_last_token_never_counts_as_cached(decode, all_prefilled):
    decode.add("r", range(PROMPT), all_prefilled)
    ticket = ticket_id(decode)
    assert arrives(decode, "r", received(ticket, 1 << 30)) == PROMPT - 1


def test_of_several_ranks_the_least_counts(decode, all_prefilled):
    decode.add("r", range(PROMPT), all_prefilled)
    ticket = ticket_id(decode)
    decode.step(received(ticket, 64))  # a rank that is done before the others
    assert arrives(decode, "r", received(ticket, 48), received(ticket, 80)) == 48


def test_a_prompt_that_decode_computes_after_a_failed_transfer(scheduled_model, all_prefilled):
    with closing(RealScheduler(Role.DECODE, scheduled_model, load_failure_policy="recompute")) as decode:
        decode.add("before", range(PROMPT))
        decode.step()
        decode.add("r", [*range(PROMPT), *range(40)], all_prefilled)
        step, _ = decode.step()
        [expect] = step.kv_connector_metadata.step.expects
        failed = WorkerReport(failed={expect.ticket_id: "the link is down"})
        decode.step(failed, finished_recving={"r"}, invalid_block_ids=set(expect.blocks))
        _, outputs = decode.step()
    assert cached_tokens(outputs) == 6 * BLOCK


def test_preempted_before_its_first_token(decode, all_prefilled):
    """The KV is still in decode's cache then: vLLM before 0.30 would count that."""
    request = decode.add("r", range(PROMPT), all_prefilled, max_tokens=2)
    decode.step(received(ticket_id(decode), BLOCK), finished_recving={"r"})
    decode.schedule()
    decode.preempt(request)
    _, outputs = decode.step()
    assert request.num_preemptions == 1
    assert cached_tokens(outputs) == BLOCK


def never_computes(model: Path) -> RealScheduler:
    """A decode engine that asks for another ticket where others compute the prompt."""
    return RealScheduler(Role.DECODE, model, load_failure_policy="recompute", extra={"who_computes": "never"})


def test_what_prefill_computed_for_an_earlier_ticket_does_not_count(scheduled_model, all_prefilled):
    """The request is preempted before its first token, and prefill has cached what it computed for the first ticket."""
    with closing(never_computes(scheduled_model)) as decode:
        request = decode.add("r", range(PROMPT), all_prefilled, max_tokens=2)
        decode.step(received(ticket_id(decode), BLOCK), finished_recving={"r"})
        decode.schedule()
        decode.preempt(request)
        decode.pool.reset_prefix_cache()
        assert arrives(decode, "r", received(ticket_id(decode), 6 * BLOCK)) == BLOCK
    assert request.num_preemptions == 1


@pytest.mark.parametrize("had", [0, 2 * BLOCK])
def test_what_prefill_computed_for_a_ticket_that_failed_does_not_count(scheduled_model, all_prefilled, had):
    with closing(never_computes(scheduled_model)) as decode:
        decode.add("r", range(PROMPT), all_prefilled)
        step, _ = decode.step()
        [expect] = step.kv_connector_metadata.step.expects
        failed = WorkerReport(failed={expect.ticket_id: "the link is down"}, cached={expect.ticket_id: had})
        decode.step(failed, finished_recving={"r"}, invalid_block_ids=set(expect.blocks))
        assert arrives(decode, "r", received(ticket_id(decode), 6 * BLOCK)) == had


def ticketed(request_id: str, tokens: int, blocks: list[int]) -> dict[str, Any]:
    ticket = ticket_with(
        request_id=request_id,
        remote_block_ids=[blocks],
        remote_block_size=[BLOCK],
        remote_engine_id="decode",
        remote_port=20001,
        ticket_id=f"{int(request_id[1:]):032x}",
        num_tokens=tokens,
    )
    return msgspec.to_builtins(ticket)


def reported(scheduler: RealScheduler, steps: int = 3) -> dict[str, int]:
    """What prefill's ranks are told, in all of some steps."""
    told: dict[str, int] = {}
    for _ in range(steps):
        step, _ = scheduler.step()
        assert not told.keys() & step.kv_connector_metadata.step.cached_tokens.keys()
        assert step.kv_connector_metadata.step.cached_tokens.keys() == step.kv_connector_metadata.step.tickets.keys()
        told |= step.kv_connector_metadata.step.cached_tokens
    return told


def test_a_preemption_on_prefill_does_not_make_computed_tokens_cached(prefill):
    request = prefill.add("r1", range(PROMPT), ticketed("r1", PROMPT, list(range(1, 8))))
    first, _ = prefill.step()  # the first 64 tokens
    prefill.preempt(request)
    assert first.kv_connector_metadata.step.cached_tokens == {"r1": 0}
    assert reported(prefill) == {}
    assert request.num_preemptions == 1
