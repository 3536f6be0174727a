# SPDX-License-Identifier: Apache-2.0
"""All requests end even if decode's blocks run out, with vLLM's own scheduler.

None waits for ever for blocks of another one that waits.
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import vllm

from harness.decode_scheduler import (
    BLOCK,
    DRAFTS,
    LONGEST,
    MAX_MODEL_LEN,
    EngineScheduler,
    MakeScheduler,
    closed_schedulers,
)
from vllm_ascend_pd.connector import patches
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.step import WorkerReport

with_and_without_drafts = pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
orders = pytest.mark.parametrize("order", ["fcfs", "priority"])


make = closed_schedulers()


@orders
def test_requests_that_have_arrived_find_blocks_for_their_drafts(make: MakeScheduler, order: str) -> None:
    """Two prompts fill all blocks. Each needs another block for its drafts."""
    decode = make(blocks=8, drafts=True, order=order)
    decode.add("a", 4 * BLOCK)
    decode.add("b", 4 * BLOCK)
    decode.run()


@orders
def test_a_request_that_has_arrived_finds_a_block_for_its_last_token(make: MakeScheduler, order: str) -> None:
    """The transfer fills its blocks, and windows leave the last token to decode."""
    decode = make(blocks=20, windowed=True, order=order)
    for name in "abcd":
        decode.add(name, 2 * BLOCK + 1)
    decode.run()


@orders
@with_and_without_drafts
def test_a_request_that_has_arrived_finds_blocks_for_its_state(make: MakeScheduler, drafts: bool, order: str) -> None:
    """Four transfers fill all blocks. Each request's last token begins a block, and its state before stays cached."""
    blocks = 4 * (3 + 1 + (DRAFTS if drafts else 0))
    decode = make(blocks=blocks, states=True, caching=True, drafts=drafts, order=order)
    for number, name in enumerate("abcd"):
        decode.add(name, 2 * BLOCK + 1, first=1000 * number)
    decode.run()


@orders
def test_a_cached_state_needs_no_block_beside_a_transfers(make: MakeScheduler, order: str) -> None:
    """The prompt takes all blocks there are, and begins with one whose state is cached."""
    decode = make(blocks=LONGEST + 2, states=True, caching=True, order=order)
    for name, tokens in (("cached", 2 * BLOCK + 1), ("long", 7 * BLOCK + 1)):
        decode.add(name, tokens)
        decode.run()


@orders
def test_blocks_beyond_what_a_request_needs_are_not_counted_as_free(make: MakeScheduler, order: str) -> None:
    """The drafts of a first step begin another block, for which the request has a state."""
    decode = make(blocks=15, states=True, caching=True, drafts=True, order=order)
    for number, name in enumerate("abc"):
        decode.add(name, 2 * BLOCK, first=1000 * number)
    decode.run()


@orders
@with_and_without_drafts
def test_a_grammar_that_gets_ready_does_not_hold_up_requests_that_have_arrived(
    make: MakeScheduler, drafts: bool, order: str
) -> None:
    """Its request needs more blocks than are free, and is first in the queue."""
    decode = make(blocks=LONGEST, drafts=drafts, order=order)
    guided = decode.add("guided", 6 * BLOCK, grammar=True)
    decode.add("plain", 4 * BLOCK)
    decode.step()
    assert set(decode.expected) == {"plain"}
    decode.ready(guided)
    decode.run()


@with_and_without_drafts
def test_a_request_of_higher_priority_does_not_hold_up_who_has_arrived(make: MakeScheduler, drafts: bool) -> None:
    decode = make(blocks=LONGEST, drafts=drafts, order="priority")
    decode.add("low", 4 * BLOCK, priority=1)
    decode.step()
    decode.add("high", 6 * BLOCK, priority=0)
    decode.run()


@orders
@with_and_without_drafts
def test_a_request_that_has_failed_and_one_that_has_arrived(make: MakeScheduler, drafts: bool, order: str) -> None:
    """The first must be computed again, beside the second."""
    decode = make(blocks=LONGEST + 2, drafts=drafts, caching=True, failures="recompute", order=order)
    decode.add("fails", 6 * BLOCK)
    decode.add("arrives", 2 * BLOCK, first=1000)
    decode.step()
    assert set(decode.expected) == {"fails", "arrives"}
    decode.fails("fails")
    decode.run()


@orders
def test_a_request_that_has_failed_does_not_keep_others_from_their_transfers(make: MakeScheduler, order: str) -> None:
    """It may not be computed beside another adapter. When it may, a request stands before it for which there are too
    few blocks beside those that it would need."""
    decode = make(blocks=LONGEST + 2, failures="recompute", max_loras=1, order=order)
    guided = decode.add("guided", 7 * BLOCK, grammar=True)
    decode.add("runs", BLOCK, generates=8, lora=1)
    decode.add("fails", 6 * BLOCK, lora=2)
    decode.step()
    assert set(decode.expected) == {"runs", "fails"}
    decode.arrives("runs")
    decode.fails("fails")
    decode.step()
    for _ in range(4):
        assert decode.step() == {"runs"}
    decode.ready(guided)
    decode.run()


@orders
def test_a_request_that_has_lost_its_blocks_does_not_hold_up_who_has_arrived(make: MakeScheduler, order: str) -> None:
    """Prefill is asked for it once more. It gets blocks for that beside the other one, or behind it."""
    decode = make(blocks=LONGEST + 2, failures="recompute", who_computes="never", order=order)
    decode.add("fails", 6 * BLOCK)
    decode.add("arrives", 2 * BLOCK, first=1000)
    decode.step()
    assert set(decode.expected) == {"fails", "arrives"}
    decode.fails("fails")
    decode.run()


@pytest.mark.parametrize(("failures", "windowed"), [("fail", False), ("recompute", False), ("fail", True)], ids=str)
def test_a_request_does_not_wait_for_a_prefill_process_that_is_stopped(
    make: MakeScheduler, failures: str, windowed: bool
) -> None:
    """Its transfer has failed and does not end, so its blocks are kept."""
    decode = make(blocks=2 * LONGEST + 1, failures=failures, windowed=windowed)
    role = decode.connector._role
    role._failed_wait_s = 0.05
    request = decode.add("waits", 3 * BLOCK)
    decode.step()
    decode.step()
    begun = time.monotonic()
    role.update(WorkerReport(failed={decode.expected["waits"].ticket_id: "prefill went silent"}), set())
    while not request.is_finished() and time.monotonic() < begun + 5:
        decode.step()
    assert 0.05 <= time.monotonic() - begun < 5
    assert decode.given_up == ["waits"]
    for _ in range(3):
        decode.step()
    assert decode.free < decode.all_free
    decode.fails("waits")
    decode.step()


@orders
def test_an_adapter_that_had_to_wait_does_not_keep_its_blocks_for_ever(make: MakeScheduler, order: str) -> None:
    """What has arrived may not run beside other adapters. When it may, another request stands before it."""
    decode = make(blocks=LONGEST + 1, max_loras=1, order=order)
    guided = decode.add("guided", 7 * BLOCK, grammar=True)
    decode.add("one", 2 * BLOCK, lora=1, generates=6)
    decode.add("other", 3 * BLOCK, lora=2)
    decode.step()
    decode.arrives("one", "other")
    decode.step()
    assert decode.step() == {"one"}
    decode.ready(guided)
    decode.run()


def test_requests_with_grammars_do_not_overtake_others_for_ever(make: MakeScheduler) -> None:
    """A new one comes whenever one has ended."""
    decode = make(blocks=LONGEST)
    for number in range(2):
        decode.ready(decode.add(f"guided-{number}", 5 * BLOCK, generates=2, grammar=True))
    plain = decode.add("plain", 5 * BLOCK, generates=2)
    for number in range(2, 40):
        decode.ready(decode.add(f"guided-{number}", 5 * BLOCK, generates=2, grammar=True))
        for _ in range(4):
            decode.arrives(*decode.expected)
            decode.step()
    assert plain.is_finished()
    decode.run(400)


@orders
@pytest.mark.parametrize("tokens", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN - BLOCK, MAX_MODEL_LEN - BLOCK + 1])
@with_and_without_drafts
def test_a_request_gets_all_blocks_there_are(make: MakeScheduler, drafts: bool, tokens: int, order: str) -> None:
    decode = make(blocks=LONGEST, drafts=drafts, order=order)
    decode.add("before", BLOCK)
    decode.add("long", tokens, generates=MAX_MODEL_LEN - tokens)
    decode.add("behind", 2 * BLOCK)
    decode.run(100)


@orders
def test_a_step_looks_once_at_each_request_whose_connector_has_no_answer(
    make: MakeScheduler, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request waits for its KV, and each further one for its connector."""

    def calls(waiting: int) -> int:
        decode = make(blocks=20, order=order)
        with monkeypatch.context() as patched:
            decode.add("transferred", 2 * BLOCK)
            decode.step()
            patched.setattr(decode.connector, "get_num_new_matched_tokens", lambda request, computed: (None, False))
            for number in range(waiting):
                decode.add(str(number), BLOCK)
            decode.step()
            count, folder = 0, Path(patches.__file__).parent

            def count_calls(frame: Any, event: str, argument: object) -> None:
                nonlocal count
                count += event == "call" and Path(frame.f_code.co_filename).parent == folder

            sys.setprofile(count_calls)
            try:
                decode.step()
            finally:
                sys.setprofile(None)
        decode.run(steps=200)
        return count

    few, many = calls(20), calls(60)
    assert few > 20
    assert many < 4 * few


@pytest.mark.skipif(HAS_TRANSFER_RESULTS, reason="vLLM itself counts its own block")
def test_an_engine_with_one_block_less_than_a_request_takes_does_not_start(make_any: MakeScheduler) -> None:
    """vLLM 0.23 would start, and a request of that length would wait for ever."""
    with pytest.raises(ConfigError, match=f"has {LONGEST} blocks.*--max-model-len {MAX_MODEL_LEN}"):
        make_any(blocks=LONGEST - 1)


def test_tickets_name_no_blocks_behind_the_prompt(make: MakeScheduler) -> None:
    decode = make(blocks=LONGEST, drafts=True)
    decode.add("a", 2 * BLOCK)
    decode.step()
    [ticket] = [transfer.ticket for transfer in decode.connector._role._transfers.values()]
    assert [len(ids) for ids in ticket.remote_block_ids] == [2]
    assert len(decode.expected["a"].blocks) == 2
    decode.run()


VERSION = ".".join(vllm.__version__.split(".")[:2])
OLDER, NEWER = {"0.23", "0.30"}, {"0.32", "0.33"}
WRONG_IN_VLLM: list[tuple[Callable[..., None], dict[str, Any], set[str]]] = [
    (test_requests_that_have_arrived_find_blocks_for_their_drafts, {}, OLDER),
    (test_a_request_that_has_arrived_finds_a_block_for_its_last_token, {}, set()),
    (test_a_request_that_has_arrived_finds_blocks_for_its_state, {"drafts": True}, set()),
    (test_a_cached_state_needs_no_block_beside_a_transfers, {}, set()),
    (test_blocks_beyond_what_a_request_needs_are_not_counted_as_free, {}, set()),
    (test_a_grammar_that_gets_ready_does_not_hold_up_requests_that_have_arrived, {"drafts": False}, OLDER),
    (test_a_request_of_higher_priority_does_not_hold_up_who_has_arrived, {"drafts": False}, OLDER),
    (test_a_request_that_has_failed_and_one_that_has_arrived, {"drafts": True}, set()),
    (test_a_request_that_has_failed_does_not_keep_others_from_their_transfers, {}, OLDER | NEWER),
    (test_a_request_that_has_lost_its_blocks_does_not_hold_up_who_has_arrived, {}, OLDER | NEWER),
    (test_an_adapter_that_had_to_wait_does_not_keep_its_blocks_for_ever, {}, OLDER),
    (test_requests_with_grammars_do_not_overtake_others_for_ever, {}, OLDER),
    (test_a_request_gets_all_blocks_there_are, {"drafts": True, "tokens": MAX_MODEL_LEN - 1}, NEWER),
]
"""Tests in which requests wait for ever without the patch of the queues, and in which versions of vLLM they do."""


@pytest.fixture
def parts(make_any: MakeScheduler) -> dict[tuple[type, str], Any]:
    """What the patch of the queues replaces: class and method -> vLLM's own."""
    make_any(blocks=LONGEST).close()
    return {
        (owner, name): before
        for (owner, name, module), before in patches._replaced.items()
        if module.endswith("_scheduler")
    }


def wrong(make_any: MakeScheduler) -> Iterator[str]:
    """Yields the tests of `WRONG_IN_VLLM` that fail now."""
    made: list[EngineScheduler] = []

    def make(*args: Any, **of: Any) -> EngineScheduler:
        made.append(make_any(*args, **of))
        return made[-1]

    try:
        for test, of, _ in WRONG_IN_VLLM:
            for order in ("fcfs", "priority"):
                has_order = "order" in inspect.signature(test).parameters
                try:
                    test(make, **of, **({"order": order} if has_order else {}))
                except (AssertionError, ValueError):  # ValueError: vLLM takes more blocks than are free
                    yield test.__name__
    finally:
        for decode in made:
            decode.connector.shutdown()


def test_what_the_patch_is_for(
    make_any: MakeScheduler, parts: dict[tuple[type, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for (owner, name), by_vllm in parts.items():
        monkeypatch.setattr(owner, name, by_vllm)
    assert set(wrong(make_any)) == {test.__name__ for test, _, versions in WRONG_IN_VLLM if VERSION in versions}


def test_each_part_of_the_patch_is_needed(make_any: MakeScheduler, parts: dict[tuple[type, str], Any]) -> None:
    for (owner, name), by_vllm in parts.items():
        with pytest.MonkeyPatch.context() as patched, closing(wrong(make_any)) as names:
            patched.setattr(owner, name, by_vllm)
            assert next(names, None), f"nothing goes wrong without the patch of {name}"
