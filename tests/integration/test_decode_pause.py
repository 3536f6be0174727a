# SPDX-License-Identifier: Apache-2.0
"""Pauses of a decode engine, and resets of its prefix cache, while KV is in flight, with vLLM's own scheduler."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.v1.engine.core import EngineCoreProc

from harness.decode_scheduler import BLOCK, LONGEST, EngineScheduler, MakeScheduler, closed_schedulers
from vllm_ascend_pd.core.reasons import Reason

who_computes = pytest.mark.parametrize("who_computes", ["prefill", "never"])


make = closed_schedulers(caching=True)


def engine_core(decode: EngineScheduler) -> Any:
    """Returns vLLM's engine core with this scheduler, and without ranks and clients."""
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler, core.model_executor, core.output_queue = decode.vllm, MagicMock(), MagicMock()
    core.engines_running, core.batch_queue, core.mm_receiver_cache = False, None, None
    core._idle_state_callbacks = []
    return core


@who_computes
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_pause_waits_for_transfers_and_then_empties_the_cache(
    make: MakeScheduler, mode: str, who_computes: str
) -> None:
    decode = make(blocks=3 * LONGEST, who_computes=who_computes)
    core = engine_core(decode)
    for number, name in enumerate(("runs", "arrives", "is under way")):
        decode.add(name, 2 * BLOCK, first=1000 * number)
    decode.step()
    decode.arrives("runs")
    decode.step()
    decode.step()
    paused = core.pause_scheduler(mode)
    for end in ("arrives", "is under way"):
        for _ in range(10):  # whoever was running has ended, or stands still
            decode.step()
        assert core.has_work(), "the engine is idle while prefill may write to its blocks"
        decode.arrives(end)
    for _ in range(10):  # vLLM 0.32 and 0.33 let those run whose KV has arrived, in the mode "wait"
        decode.step()
    assert not core.has_work()
    core._notify_idle_state_callbacks()
    assert paused.result(0) is None
    assert decode.free == decode.all_free, decode.state()
    core.resume_scheduler()
    decode.run()
    assert decode.given_up == []


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_prompts_that_prefill_computes_first_outlast_a_pause(make: MakeScheduler, mode: str) -> None:
    """They have no blocks, so it takes effect at once. After a sleep, their tickets have the engine's new name."""
    decode = make(blocks=3 * LONGEST, prefill_first=BLOCK)
    core = engine_core(decode)
    for number, name in enumerate(("is computed", "is posted")):
        decode.add(name, 2 * BLOCK, first=1000 * number)
    decode.step()
    assert core.pause_scheduler(mode) is None, "there is nothing to wait for"
    decode.computed_first("is computed")
    for _ in range(3):
        decode.step()
    assert not core.has_work()
    assert decode.free == decode.all_free
    decode.connector._role.renamed("awake")
    core.resume_scheduler()
    decode.step()
    assert decode.connector._role._transfers["is computed"].ticket.remote_engine_id == "awake"
    decode.computed_first("is posted")
    decode.run()
    assert decode.given_up == []


def test_a_pause_that_aborts_waits_for_the_transfers_of_requests_that_have_ended(make: MakeScheduler) -> None:
    """A writer may be stopped, so the blocks are not free yet."""
    decode = make(blocks=LONGEST)
    core = engine_core(decode)
    decode.add("aborted", 2 * BLOCK)
    decode.step()
    paused = core.pause_scheduler("abort")
    for _ in range(4):
        decode.step()
        assert core.has_work()
    decode.arrives("aborted")
    decode.step()
    assert not core.has_work()
    core._notify_idle_state_callbacks()
    assert paused.result(0) is None


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


@who_computes
@pytest.mark.parametrize("generates", [1, 4])
def test_output_that_is_in_flight_when_a_reset_preempts_its_request_does_no_harm(
    make: MakeScheduler, generates: int, who_computes: str
) -> None:
    """The request may start again, or wait for KV, in the next step."""
    decode = make(blocks=LONGEST, pipelined=True, who_computes=who_computes)
    decode.add("runs", 2 * BLOCK, generates=generates)
    ran: set[str] = set()
    for _ in range(10):
        decode.arrives(*decode.expected)
        if ran:
            break
        ran = decode.step()
    assert ran == {"runs"}
    assert decode.vllm.reset_prefix_cache(reset_running_requests=True)
    decode.run()
    assert decode.given_up == []


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
