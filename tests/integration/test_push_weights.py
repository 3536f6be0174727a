# SPDX-License-Identifier: Apache-2.0
"""KV of other weights than decode's is refused, whenever they came to differ (R8)."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from harness.kv import GQA, Side
from harness.rank_programs import DecodeRank
from harness.ranks import Pair, expect_delivery, expect_failure, prefill, prompts, run
from harness.waiting import wait_until
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, Send
from vllm_ascend_pd.observe.stats import PUSH_FAILURES


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(GQA, Side(2), Side(1), {"grant_timeout_s": 30.0, **getattr(request, "param", {})})
    yield made
    assert made.close() == []


def configured(**config: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [config], indirect=True, ids=[""])


def load(ranks: list[Any], seed: int) -> str:
    [fingerprint] = {rank.call("load_weights", seed) for rank in ranks}
    return fingerprint


def load_both(pair: Pair) -> None:
    load(pair.p_ranks, 1)
    load(pair.d_ranks, 1)


def test_other_weights_are_refused_and_both_named(pair: Pair) -> None:
    ours, theirs = load(pair.p_ranks, 1), load(pair.d_ranks, 2)
    run(pair, prompts(pair, [40, 50]))
    expect_failure(pair, f"prefill computed with weights {ours}, this engine has {theirs}", count=2)


@configured(allow_other_model=True)
def test_other_weights_are_delivered_where_decode_allows_it(pair: Pair) -> None:
    load(pair.p_ranks, 1)
    load(pair.d_ranks, 2)
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_delivery(pair, requests)


@pytest.mark.parametrize("known", ["prefill", "decode"])
def test_weights_that_one_side_does_not_know_are_not_compared(pair: Pair, known: str) -> None:
    """As with engines of random weights, and with engines that do not say."""
    load(pair.p_ranks if known == "prefill" else pair.d_ranks, 1)
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_delivery(pair, requests)


@pytest.mark.parametrize("updated", ["prefill", "decode"])
def test_what_is_updated_on_one_side_is_refused_until_the_other_is_too(pair: Pair, updated: str) -> None:
    ranks, others = (pair.p_ranks, pair.d_ranks) if updated == "prefill" else (pair.d_ranks, pair.p_ranks)
    load_both(pair)
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_delivery(pair, requests)
    load(ranks, 2)
    run(pair, requests)
    expect_failure(pair, "prefill computed with weights")
    load(others, 2)
    run(pair, requests)
    expect_delivery(pair, requests)


def begin(pair: Pair) -> tuple[list[Any], dict[str, Any]]:
    """A prompt of which a part is computed, and all grants are given."""
    [request] = requests = prompts(pair, [64])
    by_id = {request.request_id: request}
    tickets = pair.announce(requests)
    size = pair.prefill.block_size
    first = Send(request.request_id, 0, size, (request.p_blocks[:1],), last=False)
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets, sends=[first]), by_id)
    pair.wait_granted()
    return requests, by_id


def end(pair: Pair, requests: list[Any], by_id: dict[str, Any]) -> None:
    [request] = requests
    size = pair.prefill.block_size
    rest = Send(request.request_id, size, request.num_tokens, (request.p_blocks[1:],), last=True)
    pair.each(pair.p_ranks, "step", PrefillStep(sends=[rest]), by_id)
    pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id)), by_id)


def test_prefills_weights_updated_in_the_middle_of_a_prompt_fail_it(pair: Pair) -> None:
    """Its KV is of both, also where the first ones come back."""
    load_both(pair)
    requests, by_id = begin(pair)
    load(pair.p_ranks, 2)
    load(pair.p_ranks, 1)
    end(pair, requests, by_id)
    expect_failure(pair, "prefill's weights were updated before all KV was sent")
    causes = [rank.call("stats")["counters"][PUSH_FAILURES.name] for rank in pair.p_ranks]
    assert {"weights": 1} in causes


@configured(lease_s=60.0)  # not renewed before the end: the report alone can tell
def test_decodes_weights_updated_in_the_middle_of_a_transfer_fail_it(pair: Pair) -> None:
    load_both(pair)
    requests, by_id = begin(pair)
    load(pair.d_ranks, 2)
    load(pair.d_ranks, 1)
    end(pair, requests, by_id)
    assert "decode's weights were updated before all KV was here" in pair.wait_arrivals(1)[1]["request-0"]


@configured(lease_s=1.0)
def test_an_update_of_decode_is_noticed_at_the_next_renewal(pair: Pair) -> None:
    load_both(pair)
    _, by_id = begin(pair)
    load(pair.d_ranks, 2)
    wait_until(lambda: all(rank.call("open_failures") for rank in pair.p_ranks), 30)
    pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id)), by_id)
    expect_failure(pair, "this engine has")


loading = ExitStack()
"""In the process of a rank."""


def begin_loading(rank: DecodeRank) -> None:
    loading.enter_context(rank.loaded.changing("reload_weights", lambda: f"{1:032x}"))


def end_loading(rank: DecodeRank) -> None:
    loading.close()


def test_while_decode_loads_weights_prefill_asks_on(pair: Pair) -> None:
    load(pair.p_ranks, 1)
    pair.each(pair.d_ranks, "do", begin_loading)
    requests = prompts(pair, [40])
    tickets = pair.announce(requests)
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets), {p.request_id: p for p in requests})
    assert not any(pair.each(pair.p_ranks, "is_granted"))
    pair.each(pair.d_ranks, "do", end_loading)
    pair.wait_granted()
    prefill(pair, requests, {})
    expect_delivery(pair, requests)


def test_a_prompt_that_was_cached_before_the_update_fails_until_the_scheduler_knows(pair: Pair) -> None:
    """Its cached part is KV of the old weights. Whoever asks again gets what the new ones compute."""
    load(pair.p_ranks, 1)
    load(pair.d_ranks, 2)
    load(pair.p_ranks, 2)
    updates = known_updates(pair.p_ranks)
    requests = prompts(pair, [40])
    prefill(pair, requests, pair.announce(requests), cached_tokens=16)
    expect_failure(pair, "prefill's weights were updated, or it slept, and a part of the prompt was computed before")
    prefill(pair, requests, pair.announce(requests), cached_tokens=16, weight_updates=updates)
    expect_delivery(pair, requests)


def test_each_update_is_reported_once(pair: Pair) -> None:
    for ranks in (pair.p_ranks, pair.d_ranks):
        assert known_updates(ranks) == {}, "as the engine was started"
        load(ranks, 1)
        first = known_updates(ranks)
        assert len(first) == len(ranks)
        assert known_updates(ranks) == {}
        load(ranks, 2)
        assert all(count > first[rank] for rank, count in known_updates(ranks).items())


def test_an_update_is_reported_again_after_lost_steps(pair: Pair) -> None:
    """The report may not have reached the scheduler, which would not know of the update."""
    for ranks, step in (
        (pair.p_ranks, (PrefillStep(computes=False, report_again=set()), {})),
        (pair.d_ranks, (DecodeStep(report_again=set()),)),
    ):
        load(ranks, 1)
        reported = known_updates(ranks)
        pair.each(ranks, "step", *step)
        assert known_updates(ranks) == reported != {}


def test_a_prompt_that_decode_cached_before_its_update_fails_until_its_scheduler_knows(pair: Pair) -> None:
    load_both(pair)
    requests = prompts(pair, [64], cached=32)
    run(pair, requests)
    expect_failure(pair, "decode's weights were updated, and a part of the prompt was cached before")
    run(pair, prompts(pair, [64]))
    assert pair.wait_arrivals(1)[0] == {"request-0"}
    pair.wait_sent(1)


def test_decodes_weights_updated_between_ticket_and_grant_fail_a_prompt_that_it_has_cached_in_part(pair: Pair) -> None:
    requests = prompts(pair, [64], cached=32)
    tickets = pair.announce(requests)
    load_both(pair)
    prefill(pair, requests, tickets)
    expect_failure(pair, "decode's weights were updated, and a part of the prompt was cached before")


@configured(allow_other_model=True)
def test_decode_weights_updated_between_ticket_and_grant_where_decode_allows_another_model(
    pair: Pair,
) -> None:
    requests = prompts(pair, [64], cached=32)
    tickets = pair.announce(requests)
    load(pair.p_ranks, 1)
    load(pair.d_ranks, 2)
    prefill(pair, requests, tickets)
    assert pair.wait_arrivals(1) == ({"request-0"}, {})
    pair.wait_sent(1)


def known_updates(ranks: list[Any]) -> dict[str, int]:
    """What the ranks report of their updates."""
    return {rank: count for each in ranks for rank, count in each.call("weight_updates").items()}
