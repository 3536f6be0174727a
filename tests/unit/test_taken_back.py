# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler takes back of what it had counted as computed, and what prefill makes of it: decode is told of
success only if it has right KV."""

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from harness.held_prompts import PREFILL_FIRST
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK
from harness.scheduling import remembered
from harness.taken_back import PrefillBesidePool

BLOCKS = 5
"""The pool has this many blocks of the prompt."""
PROMPT = list(range(100, 100 + BLOCKS * BLOCK + 4))

Start = Callable[..., PrefillBesidePool]


@pytest.fixture
def start(scheduled_model: Path) -> Iterator[Start]:
    started: list[PrefillBesidePool] = []

    def start(*args: Any, **options: Any) -> PrefillBesidePool:
        started.append(PrefillBesidePool(scheduled_model, *args, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("step_tokens", [512, 48], ids=["one-step", "chunks"])
def test_a_load_fails_at_any_block(start: Start, policy: str, step_tokens: int, in_background: bool) -> None:
    prefill = start(policy, step_tokens=step_tokens)
    prefill.pool_connector.in_background = in_background
    for number in range(BLOCKS):
        prefill.failing = {number}
        name = f"r{number}"
        prefill.ask(name, [number, *PROMPT[1:]], has=BLOCKS * BLOCK)
        prefill.run()
        reason = prefill.ranks.told.get(name, "the ranks were never told of it")
        assert (reason is None) == (policy == "recompute"), reason
    assert remembered(prefill.ours._role) == {}


@pytest.mark.parametrize("step_tokens", [512, 48], ids=["one-step", "chunks"])
def test_a_load_fails_while_further_steps_are_in_flight(start: Start, step_tokens: int) -> None:
    """vLLM's own answer may be wrong then: it may have been computed from what was not loaded."""
    prefill = start(step_tokens=step_tokens, scheduler_class=AsyncScheduler)
    for number in range(BLOCKS):
        prefill.failing = {number}
        prefill.ask(f"r{number}", [number, *PROMPT[1:]], has=BLOCKS * BLOCK)
        prefill.run(depth=2)
    assert len(prefill.ranks.told) == BLOCKS
    assert remembered(prefill.ours._role) == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_that_fails_to_load_is_of_two_requests(start: Start, depth: int) -> None:
    prefill = start(step_tokens=96, scheduler_class=AsyncScheduler if depth == 2 else Scheduler)
    prefill.failing = {1}
    prefill.ask("first", PROMPT, has=BLOCKS * BLOCK)
    prefill.ask("second", [*PROMPT, *range(1000, 1300)])
    prefill.run(depth)
    assert prefill.ranks.told == {"first": None, "second": None}
    prefill.ask("longer", [*PROMPT, *range(1000, 1350)])
    prefill.run(depth)
    assert prefill.ranks.told["longer"] is None


@pytest.mark.parametrize("how", ["blocks-run-out", "reset"])
def test_a_load_fails_of_a_request_that_was_preempted_meanwhile(start: Start, how: str) -> None:
    prefill = start(scheduler_class=AsyncScheduler)
    prefill.failing = {0}
    request = prefill.ask("r", PROMPT, has=2 * BLOCK)
    prefill.begin()
    if how == "reset":
        assert prefill.vllm.reset_prefix_cache(reset_running_requests=True)
    else:
        if "drop_stale_output" not in inspect.signature(prefill.vllm._preempt_request).parameters:
            pytest.skip("vLLM 0.23 has no word for an output that comes after a preemption")
        prefill.vllm.running.remove(request)
        prefill.vllm._preempt_request(request, 0.0, drop_stale_output=True)
        prefill.vllm.waiting.remove_request(request)  # it finds no blocks yet
        prefill.ask("other", range(600, 640))
        prefill.begin()
        prefill.see()
        prefill.vllm.waiting.prepend_request(request)
    prefill.run(depth=2)
    assert "r" in prefill.ranks.told
    prefill.ask("same", PROMPT)  # what was computed from the failed load is not cached
    prefill.run(depth=2)
    assert prefill.ranks.told["same"] is None


def test_a_load_fails_of_a_request_of_which_a_part_was_sent_before_it_was_preempted(start: Start) -> None:
    """Its next step computes all of it again, but sends only the rest."""
    prefill = start(step_tokens=96, scheduler_class=AsyncScheduler)
    prefill.failing = {0}
    prefill.add("other", list(range(600, 660)), None)
    prefill.ask("r", PROMPT, has=2 * BLOCK)
    [first] = prefill.step_of(prefill.begin()).sends
    assert not first.last
    prefill.vllm.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    assert prefill.vllm.reset_prefix_cache(reset_running_requests=True)
    [rest] = prefill.step_of(prefill.begin()).sends
    assert rest.last
    assert rest.start == first.stop
    prefill.see()
    prefill.see()
    prefill.run(depth=2)
    assert "r" in prefill.ranks.told


def test_decode_keeps_what_it_has_cached(start: Start) -> None:
    """Its blocks may be other requests', too."""
    prefill = start()
    prefill.failing = {0}
    prefill.ask("r", PROMPT, has=BLOCKS * BLOCK, cached=2 * BLOCK)
    prefill.run()
    assert prefill.ranks.told["r"] is None
    assert set(prefill.ranks.decode["r"]) == set(range(2 * BLOCK, len(PROMPT)))


@pytest.mark.parametrize("ends", ["client-leaves", "preempted"])
def test_a_request_stops_before_its_blocks_are_computed_again(start: Start, ends: str) -> None:
    prefill = start(step_tokens=96)
    prefill.failing = {1}
    request = prefill.ask("r", PROMPT, has=BLOCKS * BLOCK)
    prefill.begin()
    prefill.see()
    if ends == "preempted":
        prefill.preempt(request)
        prefill.pool.reset_prefix_cache()
    else:
        prefill.vllm.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    prefill.run()
    assert (prefill.ranks.told["r"] is None) == (ends == "preempted")


def test_a_client_leaves_before_the_output_of_the_last_step_is_seen(start: Start) -> None:
    prefill = start()
    prefill.failing = {1}
    prefill.ask("r", PROMPT, has=BLOCKS * BLOCK)
    prefill.begin()
    prefill.vllm.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    prefill.see()
    prefill.run()
    assert "aborted" in str(prefill.ranks.told["r"])


@pytest.mark.parametrize("how", ["blocks-run-out", "reset"])
def test_preemption_takes_back_nothing_that_was_sent(start: Start, how: str) -> None:
    prefill = start(step_tokens=48)
    request = prefill.ask("r", PROMPT)
    prefill.begin()
    prefill.see()
    sent = dict(prefill.ranks.decode["r"])
    if how == "reset":
        prefill.vllm.reset_prefix_cache(reset_running_requests=True)
    else:
        prefill.preempt(request)
    sends = []
    while "r" not in prefill.ranks.told:
        sends += prefill.step_of(prefill.begin()).sends
        prefill.see()
    assert min(send.start for send in sends) == len(sent) == 3 * BLOCK
    assert not any(send.again for send in sends)
    assert prefill.ranks.told["r"] is None


def test_a_reset_of_the_prefix_cache_finds_no_block_of_a_window_held(start: Start) -> None:
    prefill = start(windows=[2 * BLOCK], step_tokens=48, beside=None)
    prefill.ask("r", PROMPT)
    prefill.begin()
    prefill.see()
    assert prefill.ours._role._prompts["r"].held
    assert prefill.vllm.reset_prefix_cache(reset_running_requests=True)
    prefill.run()
    assert prefill.ranks.told["r"] is None


def test_rejected_drafts_take_back_nothing_of_the_prompt(start: Start) -> None:
    prefill = start(beside=None)
    prefill.vllm.num_spec_tokens = 2  # its statistics count them
    request = prefill.ask("r", PROMPT, max_tokens=4)
    prefill.begin()
    prefill.see()
    request.spec_token_ids = [1, 2]
    output = prefill.begin()
    assert output.scheduled_spec_decode_tokens == {"r": [1, 2]}
    computed = request.num_computed_tokens
    prefill.see()
    assert request.num_computed_tokens == computed - 2
    assert prefill.step_of(prefill.begin()).sends == []
    prefill.see()
    prefill.run()
    assert prefill.ranks.told["r"] is None


@pytest.mark.skipif(
    not vllm.__version__.startswith("0.30"),
    reason="other versions of vLLM end if a load fails and there are several cache groups",
)
def test_a_load_fails_where_layers_see_a_window(start: Start) -> None:
    """vLLM computes all of the prompt again, and blocks that have left the window are not the request's any more."""
    prefill = start(windows=[2 * BLOCK])
    prefill.failing = {1}
    prefill.ask("r", PROMPT, has=BLOCKS * BLOCK)
    prefill.run()
    assert "took back" in str(prefill.ranks.told["r"])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_fails_of_a_prompt_that_waits_for_its_ticket(start: Start, policy: str) -> None:
    prefill = start(policy, extra={"hold_timeout_s": 60})
    prefill.failing = {1}
    for name in ("first", "second"):
        prefill.pool_connector.has[name] = BLOCKS * BLOCK
        prefill.add(name, PROMPT, {**PREFILL_FIRST, "transfer_id": f"of-{name}"})
    outputs = []
    for _ in range(3):
        prefill.begin()
        outputs += prefill.see()
    offered = {each.request_id: each.kv_transfer_params for each in outputs if each.finished}
    if policy == "fail":
        assert offered == {"first": None, "second": None}
        assert prefill.ours._role._held._prompts == {}
    else:
        assert {each["transfer_id"] for each in offered.values()} == {"of-first", "of-second"}


def test_what_an_aborted_request_has_computed_is_found_by_none(start: Start) -> None:
    """vLLM looks for a failed load only in requests that run, so the blocks behind it stay cached."""
    prefill = start(extra={"hold_timeout_s": 60})
    prefill.failing = {1}
    prompt = [*PROMPT, *range(1000, 1000 + 3 * BLOCK)]
    prefill.pool_connector.has["left"] = BLOCKS * BLOCK
    prefill.add("left", prompt, {**PREFILL_FIRST, "transfer_id": "of-left"})
    prefill.begin()
    prefill.vllm.finish_requests("left", RequestStatus.FINISHED_ABORTED)
    prefill.see()
    prefill.ask("shorter", prompt[: BLOCKS * BLOCK + 1])
    prefill.run()
    prefill.ask("longer", prompt)
    prefill.run()
    assert prefill.ranks.told == {"shorter": None, "longer": None}


def test_what_nothing_can_be_taken_back_from_is_not_waited_for(start: Start) -> None:
    for options, has in (({"beside": None}, 0), ({}, 0)):
        prefill = start(**options)
        prefill.ask("r", PROMPT, has=has)
        [send] = prefill.step_of(prefill.begin()).sends
        assert (send.last, send.confirmed) == (True, True)


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events(start: Start, seed: int) -> None:
    chance = random.Random(seed)
    depth = chance.choice([1, 2])
    prefill = start(
        chance.choice(["recompute", "fail"]),
        step_tokens=chance.choice([48, 96, 512]),
        blocks=chance.choice([30, 200]),
        scheduler_class=AsyncScheduler if depth == 2 else Scheduler,
    )
    prefill.pool_connector.in_background = chance.random() < 0.3
    asked = 0
    for _ in range(80):
        if chance.random() < 0.4 and asked < 30:
            length = chance.randint(1, 200)
            prompt = list(range(chance.choice([100, 500]), 1000))[:length]
            has = chance.randrange(length) // BLOCK * BLOCK if chance.random() < 0.7 else 0
            prefill.ask(f"r{asked}", prompt, has=has)
            asked += 1
        prefill.failing = {chance.randrange(12)} if chance.random() < 0.3 else set()
        running = list(prefill.vllm.running)
        if running and chance.random() < 0.05 and not prefill.in_flight:
            prefill.preempt(chance.choice(running))
        if running and chance.random() < 0.05:
            prefill.vllm.finish_requests(chance.choice(running).request_id, RequestStatus.FINISHED_ABORTED)
        if prefill.vllm.has_requests():
            prefill.begin()
        if len(prefill.in_flight) == depth:
            prefill.see()
    prefill.failing = set()
    prefill.run(depth, steps=300)
