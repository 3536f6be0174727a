# SPDX-License-Identifier: Apache-2.0
"""How many of a prompt's tokens prefill had cached: from its ranks to decode's, in real processes."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from harness.kv import Model, Side
from harness.rank_hosts import start_afresh
from harness.rank_programs import DecodeRank
from harness.ranks import Pair, prefill, prompts
from harness.waiting import wait_until
from vllm_ascend_pd.core.step import PrefillStep

PATIENCE_S = 60.0


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    start_afresh()
    made = Pair(*request.param)
    yield made
    assert made.close() == []


def told(rank: DecodeRank) -> dict[str, int]:
    return rank.cached_tokens


def on_every_rank(pair: Pair) -> list[Any]:
    return pair.each(pair.d_ranks, "do", told)


@pytest.mark.parametrize(
    "pair",
    [(Model(), Side(2), Side(1)), (Model(), Side(1), Side(2)), (Model(heads=2), Side(4), Side(1))],
    indirect=True,
    ids=["two to one", "one to two", "replicas"],
)
def test_every_decode_rank_hears_what_prefill_had_cached(pair: Pair) -> None:
    requests = prompts(pair, [100, 40])
    tickets = pair.announce(requests)
    prefill(pair, requests, tickets, chunk=32, cached_tokens=48)
    assert pair.wait_arrivals(2, PATIENCE_S)[1] == {}
    assert on_every_rank(pair) == [{ticket.ticket_id: 48 for ticket in tickets.values()}] * len(pair.d_ranks)
    assert pair.wait_sent(2, PATIENCE_S) == {}


@pytest.mark.parametrize("pair", [(Model(), Side(2), Side(1))], indirect=True, ids=["two to one"])
@pytest.mark.parametrize(("first", "second"), [(16, 64), (64, 16)])
def test_what_an_attempt_has_computed_is_not_cached_for_the_next(pair: Pair, first: int, second: int) -> None:
    """Two attempts run at one prefill engine. The second one finds what the first has computed in the cache."""
    [prompt] = prompts(pair, [100])
    by_id, aborted = {prompt.request_id: prompt}, {prompt.request_id: "the prefill request was aborted"}
    tickets = pair.announce([prompt])
    [ticket] = tickets.values()
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets, cached_tokens={prompt.request_id: first}), by_id)
    wait_until(lambda: all(pair.each(pair.p_ranks, "has_grants", prompt.request_id)), PATIENCE_S)
    pair.each(pair.p_ranks, "step", PrefillStep(finished=aborted), by_id)
    assert pair.wait_sent(1, PATIENCE_S) == aborted
    again = {prompt.request_id: msgspec.structs.replace(ticket, attempt=1)}
    prefill(pair, [prompt], again, cached_tokens=second)
    assert pair.wait_arrivals(1, PATIENCE_S, others_follow=True) == ({prompt.request_id}, {})
    assert on_every_rank(pair) == [{ticket.ticket_id: 16}]
    assert pair.wait_sent(1, PATIENCE_S) == {}
