# SPDX-License-Identifier: Apache-2.0
"""How many of a prompt's tokens prefill had cached: from its ranks to decode's, in real processes."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.kv import Model, Side
from harness.rank_hosts import start_afresh
from harness.rank_programs import DecodeRank
from harness.ranks import Pair, prefill, prompts

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
