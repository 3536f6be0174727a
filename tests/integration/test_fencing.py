# SPDX-License-Identifier: Apache-2.0
"""Prefill processes that are stopped or die while they write: nothing lands in blocks that decode has given back. Real
processes, one SIGSTOP and one SIGKILL: tests/simulation has the rest."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.kv import Model, Prompt, Side, by_token
from harness.rank_hosts import start_afresh
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair, prefill, prompts, run
from harness.waiting import wait_until
from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.step import PrefillStep
from vllm_ascend_pd.core.ticket import Ticket

PATIENCE_S = 90.0
CONFIG = {"lease_s": 6.0, "write_timeout_s": 1.0, "control_timeout_s": 2.0, "grant_timeout_s": PATIENCE_S}
OVER_S = 6.0 + 5.0
"""A lease, and the time bytes may take to arrive with Mooncake's timeouts of a second."""

BIG = Model(layers=1, order=Order.HEAD_MAJOR, widths=(8192,))
"""A block of 1 MiB: a batch of them does not fit into the buffers of sockets."""
OTHERS = 77.0


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    start_afresh()
    made = Pair(*request.param, CONFIG)
    yield made
    for rank in made.p_ranks + made.d_ranks:
        rank.freeze(False)
    assert made.close() == []


BIG_PAIR = pytest.mark.parametrize("pair", [(BIG, Side(1), Side(1))], indirect=True, ids=["big blocks"])


def hold_writes(rank: PrefillRank) -> None:
    """Holds the next batch, whose lease has been checked, until `let_go`."""
    mooncake = rank.engine._engine
    rank.held, rank.released = threading.Event(), threading.Event()

    class Holding:
        def __getattr__(self, name: str) -> Any:
            if name == "batch_transfer_async_write":
                rank.held.set()
                assert rank.released.wait(PATIENCE_S)
            return getattr(mooncake, name)

    rank.engine._writer._mooncake = Holding()


def is_held(rank: PrefillRank) -> bool:
    return rank.held.is_set()


def let_go(rank: PrefillRank) -> None:
    rank.released.set()


def fill(rank: DecodeRank, blocks: list[int]) -> None:
    """Gives the blocks to another owner, which fills them."""
    for parts in rank.caches.values():
        for cache in parts:
            by_token(rank.model, cache)[blocks] = OTHERS


def holds_others(rank: DecodeRank, blocks: list[int]) -> bool:
    caches = [by_token(rank.model, cache)[blocks] for parts in rank.caches.values() for cache in parts]
    return all(bool((cache == OTHERS).all()) for cache in caches)


def announced(pair: Pair, prompt: Prompt) -> dict[str, Ticket]:
    """Prefill has the request's ticket and its grants, and has computed nothing yet."""
    tickets = pair.announce([prompt])
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets), {prompt.request_id: prompt})
    wait_until(lambda: all(pair.each(pair.p_ranks, "has_grants", prompt.request_id)), PATIENCE_S)
    return tickets


def stopped_in_a_batch(pair: Pair) -> tuple[Prompt, str]:
    """Stops prefill with half a batch sent: decode did not read until then. Returns the request and its ticket."""
    [p_rank], [d_rank] = pair.p_ranks, pair.d_ranks
    [small, big] = prompts(pair, [16, 50 * 16])
    run(pair, [small])  # now they know each other
    assert pair.wait_arrivals(1, PATIENCE_S) == ({small.request_id}, {})
    assert pair.wait_sent(1, PATIENCE_S) == {}
    tickets = announced(pair, big)
    p_rank.call("do", hold_writes)
    prefill(pair, [big], {})
    wait_until(lambda: p_rank.call("do", is_held), PATIENCE_S)
    d_rank.freeze()
    p_rank.call("do", let_go)
    time.sleep(0.2)
    p_rank.freeze()
    d_rank.freeze(False)
    assert pair.differences([small, big]) != []  # something is still to come
    return big, tickets[big.request_id].ticket_id


@BIG_PAIR
def test_blocks_are_kept_for_a_process_that_is_stopped(pair: Pair) -> None:
    """Its lease has passed long ago; the client knows at once that its request failed."""
    [p_rank], [d_rank] = pair.p_ranks, pair.d_ranks
    prompt, ticket_id = stopped_in_a_batch(pair)
    pair.cancel({ticket_id: "the client has left"})
    reasons: dict[str, str] = {}

    def is_warned_of() -> bool:
        finished, failed, why = d_rank.call("arrivals")
        assert (finished, failed) == (set(), set())
        reasons.update(why)
        return any("its blocks are kept for prefill rank 0" in text for text in d_rank.call("warnings"))

    wait_until(is_warned_of, PATIENCE_S)
    time.sleep(2.0)
    assert is_warned_of()
    assert reasons.keys() == {ticket_id}
    p_rank.freeze(False)
    received, failed = wait_ended(pair)
    assert (received, failed) == (set(), {prompt.request_id})
    d_rank.call("do", fill, prompt.d_blocks)
    # Decode's answer says the first, the process's own clock the second: whichever it sees first when it goes on.
    reason = pair.wait_sent(1, PATIENCE_S)[prompt.request_id]
    assert "took the ticket back" in reason or "the lease for decode rank (0, 0) ran out" in reason
    time.sleep(OVER_S)  # whatever was to come
    assert d_rank.call("do", holds_others, prompt.d_blocks)


@BIG_PAIR
def test_blocks_are_given_back_when_the_process_has_ended(pair: Pair) -> None:
    [p_rank], [d_rank] = pair.p_ranks, pair.d_ranks
    prompt, ticket_id = stopped_in_a_batch(pair)
    pair.kill(p_rank)
    pair.cancel({ticket_id: "prefill answered 502"})
    assert wait_ended(pair) == (set(), {prompt.request_id})
    d_rank.call("do", fill, prompt.d_blocks)
    time.sleep(OVER_S)
    assert d_rank.call("do", holds_others, prompt.d_blocks)


def wait_ended(pair: Pair) -> tuple[set[str], set[str]]:
    """Returns (received, failed) by the only decode rank, of the next request that ends."""
    [d_rank] = pair.d_ranks
    ended: list[tuple[set[str], set[str]]] = []

    def has_ended() -> bool:
        finished, failed, *_ = d_rank.call("arrivals")
        ended.append((finished - failed, failed))
        return bool(finished)

    wait_until(has_ended, PATIENCE_S)
    return ended[-1]
