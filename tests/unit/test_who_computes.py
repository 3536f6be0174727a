# SPDX-License-Identifier: Apache-2.0
"""Decode computes a prompt itself where its prefix cache has all of it. With vLLM's own schedulers and requests."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, RealScheduler, Role
from harness.schedulers import blocks_of
from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.observer import Observed, Observer, PromptPlaced, ThresholdSet

WHOLE = 6 * BLOCK


def computed_once(decode: RealScheduler, tokens: int) -> Request:
    """A request that leaves its prompt in decode's cache. It has an end of its own, so that the last block is whole."""
    request = decode.add("before", range(tokens), max_tokens=2)
    decode.step()
    decode.step()
    return request


def tickets(decode: RealScheduler, tokens: int, params: dict[str, Any]) -> int:
    """How many tickets decode issues for a prompt, which runs at once where there is none."""
    request = decode.add("r", range(tokens), params, max_tokens=2)
    step = decode.schedule()
    expects = step.kv_connector_metadata.step.expects
    assert (request.status == RequestStatus.RUNNING) == (not expects)
    return len(expects)


@pytest.fixture
def windowed(scheduled_model):
    decode = RealScheduler(Role.DECODE, scheduled_model, windows=(2 * BLOCK, 3 * BLOCK))
    yield decode
    decode.close()


@pytest.mark.parametrize("engine", ["decode", "windowed"])
@pytest.mark.parametrize(("tokens", "asked"), [*((n, 0) for n in (WHOLE + 1, WHOLE, BLOCK + 1, BLOCK)), (WHOLE + 2, 1)])
def test_a_prompt_that_is_cached_as_a_whole_needs_no_prefill(request, all_prefilled, engine, tokens, asked):
    """What follows the last whole block is prefill's."""
    decode = request.getfixturevalue(engine)
    computed_once(decode, tokens)
    assert tickets(decode, tokens, all_prefilled) == asked


@pytest.mark.parametrize("block", [5, 4, 0])
def test_a_block_that_the_cache_has_given_up(decode, all_prefilled, block):
    decode.evict(computed_once(decode, WHOLE), block)
    assert tickets(decode, WHOLE, all_prefilled) == 1


def test_a_window_that_the_cache_has_given_up(windowed, all_prefilled):
    """A hit ends before it, so more than the last two blocks is to be computed."""
    request = computed_once(windowed, WHOLE)
    windowed.evict(request, 3, group=1)
    assert tickets(windowed, WHOLE, all_prefilled) == 1


# Cases that need more than a scheduler of a plain model, with a pool in which just those blocks are that a test names.


def pool_with(*cached: int) -> Any:
    return SimpleNamespace(
        hash_block_size=BLOCK, get_cached_block=lambda hashed, groups: "a block" if int(hashed) in cached else None
    )


def is_cached(prompt: Any, cached: int, groups: list[Any], pool: Any) -> bool:
    return blocks_of(pool, groups).have_prompt(prompt, cached)


def prompt_of(tokens: int) -> Any:
    """The hashes of its blocks are 0, 1, 2, ..."""
    return SimpleNamespace(num_prompt_tokens=tokens, block_hashes=[b"%d" % number for number in range(tokens // BLOCK)])


PLAIN = [TokenGroup(BLOCK)]


def test_an_eagle_head_has_vllm_compute_one_block_more():
    everything = pool_with(*range(6))
    for tokens in (WHOLE, WHOLE + 1):
        assert is_cached(prompt_of(tokens), 4 * BLOCK, PLAIN, everything)
        assert not is_cached(prompt_of(tokens), 4 * BLOCK, PLAIN, pool_with(4))
        assert not is_cached(prompt_of(tokens), 4 * BLOCK, PLAIN, pool_with(5))
        assert not is_cached(prompt_of(tokens), 3 * BLOCK, PLAIN, everything)


def test_a_pool_that_is_not_known_decides_nothing():
    assert is_cached(prompt_of(WHOLE + 1), WHOLE, PLAIN, None)
    assert not is_cached(prompt_of(WHOLE), WHOLE - BLOCK, PLAIN, None)


def test_a_prompt_whose_blocks_have_no_hashes():
    """Prefix caching is off."""
    request = SimpleNamespace(num_prompt_tokens=BLOCK, block_hashes=[])
    assert not is_cached(request, 0, PLAIN, pool_with(0))


def test_a_state_is_not_computed_once_more_from_a_later_one():
    """Only a state before the last token has all that is needed."""
    groups = [TokenGroup(BLOCK), StateGroup(BLOCK)]
    assert is_cached(prompt_of(WHOLE + 1), WHOLE, groups, pool_with(*range(6)))
    assert not is_cached(prompt_of(WHOLE), WHOLE - BLOCK, groups, pool_with(*range(6)))
    assert not is_cached(prompt_of(WHOLE), 0, [StateGroup(4096)], pool_with(*range(6)))


def test_blocks_that_stand_for_tokens_of_several_ranks():
    """With decode context parallelism."""
    groups = [TokenGroup(BLOCK // 2, ranks=2)]
    assert is_cached(prompt_of(WHOLE), WHOLE - BLOCK, groups, pool_with(5))
    assert not is_cached(prompt_of(WHOLE), WHOLE - BLOCK, groups, pool_with(4))


# --- cheap prompts, each of which counts once --------------------------------------------------------------------

STEP = 128
AT_MOST = 100


@pytest.fixture
def auto(scheduled_model: Path) -> Iterator[RealScheduler]:
    """A decode engine that computes prompts of up to `AT_MOST` tokens, and has few blocks."""
    extra = {"who_computes": "auto", "decode_prompt_tokens": AT_MOST, "decode_prompt_share": 1.0}
    scheduler = RealScheduler(Role.DECODE, scheduled_model, 20, step_tokens=STEP, extra=extra)
    yield scheduler
    scheduler.close()


class Counted(Observer):
    """What was counted, as (who, why, tokens), and the latest threshold."""

    def __init__(self) -> None:
        self.prompts: list[tuple[str, str, int]] = []
        self.threshold = -1

    def on(self, event: Observed) -> None:
        if isinstance(event, PromptPlaced):
            self.prompts.append(("decode" if event.by_decode else "prefill", event.reason, event.tokens))
        elif isinstance(event, ThresholdSet):
            self.threshold = event.tokens


@pytest.fixture
def counted(auto: RealScheduler) -> Counted:
    observer = Counted()
    auto.connector._role._placement._observer = observer
    return observer


def test_two_prompts_in_chunks(auto: RealScheduler, counted: Counted, all_prefilled: Any) -> None:
    for name, first in (("a", 0), ("b", 1000)):
        auto.add(name, range(first, first + AT_MOST), all_prefilled, max_tokens=2)
    step, outputs = auto.step()
    assert step.num_scheduled_tokens == {"a": AT_MOST, "b": STEP - AT_MOST}
    assert [each.request_id for each in outputs] == ["a"]
    _, outputs = auto.step()
    assert [each.request_id for each in outputs] == ["a", "b"]
    assert counted.prompts == 2 * [("decode", "cheap", AT_MOST)]


def test_a_prompt_that_waits_for_blocks_counts_when_it_has_them(
    auto: RealScheduler, counted: Counted, all_prefilled: Any
) -> None:
    before = auto.add("before", range(1000, 1000 + 17 * BLOCK), max_tokens=100)
    auto.step()
    auto.add("waits", range(AT_MOST), all_prefilled, max_tokens=2)
    for _ in range(5):
        assert "waits" not in auto.step()[0].num_scheduled_tokens
    assert counted.prompts == []
    auto.vllm.finish_requests(before.request_id, RequestStatus.FINISHED_ABORTED)
    assert auto.schedule().num_scheduled_tokens == {"waits": AT_MOST}
    assert counted.prompts == [("decode", "cheap", AT_MOST)]


def test_a_prompt_preempted_before_its_first_token_counts_once(
    auto: RealScheduler, counted: Counted, all_prefilled: Any
) -> None:
    request = auto.add("r", range(AT_MOST), all_prefilled, max_tokens=2)
    auto.schedule()
    auto.preempt(request)
    assert set(auto.schedule().num_scheduled_tokens) == {"r"}
    assert counted.prompts == [("decode", "cheap", AT_MOST)]


def test_a_request_preempted_after_its_first_token_counts_again(
    auto: RealScheduler, counted: Counted, all_prefilled: Any
) -> None:
    request = auto.add("r", range(AT_MOST), all_prefilled, max_tokens=4)
    auto.step()
    auto.preempt(request)
    auto.step()
    cached = AT_MOST // BLOCK * BLOCK
    assert counted.prompts == [("decode", "cheap", AT_MOST), ("decode", "preempted", AT_MOST + 1 - cached)]
