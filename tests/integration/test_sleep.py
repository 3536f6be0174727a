# SPDX-License-Identifier: Apache-2.0
"""Nothing is written to a sleeping engine, and KV arrives again once it is awake. Real processes, Mooncake over TCP."""

from collections.abc import Iterator
from typing import Any

import pytest
from test_fencing import fill, hold_writes, holds_others, is_held, let_go
from test_push_weights import begin, end, load

from harness.kv import GQA, Side
from harness.pool import long
from harness.rank_hosts import start_afresh
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair, expect_delivery, expect_failure, prefill, prompts, run
from harness.waiting import wait_until
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_sleep import follow_worker
from vllm_ascend_pd.core.role import ConnectorRole
from vllm_ascend_pd.core.step import DecodeStep

CONFIG = {"write_timeout_s": 1.0, "control_timeout_s": 2.0}
SHORT_LEASES = {**CONFIG, "lease_s": 1.0}


@pytest.fixture(scope="module", autouse=True)
def _own_processes() -> None:
    """Mooncake keeps the timeouts of the first engine in a process."""
    start_afresh()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(GQA, Side(2), Side(1), getattr(request, "param", CONFIG))
    yield made
    assert made.close() == []


def sleep(rank: DecodeRank | PrefillRank) -> None:
    """As vLLM's worker does. Another owner has the memory then."""
    rank.worker.sleep()
    if isinstance(rank, DecodeRank):
        fill(rank, list(range(rank.side.num_blocks)))


def sleep_without_a_word(rank: DecodeRank) -> None:
    fill(rank, list(range(rank.side.num_blocks)))


def stay_registered(rank: DecodeRank) -> None:
    rank.engine.suspend = lambda: None


def verified(rank: DecodeRank, begun: list[str]) -> dict[str, int]:
    """Begins the first step of these tickets. Returns all results of `verify_kv`."""
    rank.step(DecodeStep(begun=begun))
    rank.arrivals()
    return dict(rank.verified)


def wake(rank: DecodeRank | PrefillRank) -> None:
    rank.worker.wake()


def wake_decode(pair: Pair) -> None:
    """As the scheduler does: tickets name another engine from now on, and its listener describes it."""
    pair.each(pair.d_ranks, "do", wake)
    pair.listener.close(5.0)
    pair._listen(f"{pair.decode_id}.1", pair.port)
    pair.each(pair.d_ranks, "clear")


def is_untouched(pair: Pair) -> bool:
    return all(rank.call("do", holds_others, list(range(pair.decode.num_blocks))) for rank in pair.d_ranks)


def test_a_transfer_ends_before_decode_sleeps_and_another_succeeds_afterwards(pair: Pair) -> None:
    requests, by_id = begin(pair)
    pair.each(pair.d_ranks, "do", sleep)
    end(pair, requests, by_id)
    expect_failure(pair, "decode sleeps (/sleep)")
    run(pair, requests)
    expect_failure(pair, "decode sleeps")
    assert is_untouched(pair)
    wake_decode(pair)
    run(pair, requests)
    expect_delivery(pair, requests)


@pytest.mark.parametrize("pair", [{**CONFIG, "verify_kv": "all"}], indirect=True, ids=["verify_kv"])
def test_kv_that_arrived_before_decode_slept_is_not_compared_with_what_others_write(pair: Pair) -> None:
    first, second = prompts(pair, [40, 70])
    run(pair, [first])
    expect_delivery(pair, [first])  # compared on arrival, and not yet once more
    begun = list(pair._request_of)
    run(pair, [second])
    pair.wait_sent(1)
    pair.each(pair.d_ranks, "do", sleep)
    wake_decode(pair)
    assert pair.wait_arrivals(1) == ({second.request_id}, {})
    assert pair.each(pair.d_ranks, "do", verified, begun) == [{"right": 1, "unknown": 1}]
    run(pair, [first])
    expect_delivery(pair, [first])
    assert pair.each(pair.d_ranks, "do", verified, []) == [{"right": 2, "unknown": 1}]


def test_without_the_hooks_kv_lands_in_memory_of_others(pair: Pair) -> None:
    """So the tests here see what they are for."""
    requests, by_id = begin(pair)
    pair.each(pair.d_ranks, "do", sleep_without_a_word)
    end(pair, requests, by_id)
    pair.wait_arrivals(1)
    assert not is_untouched(pair)
    assert pair.wait_sent(1) == {}


@pytest.mark.parametrize("pair", [SHORT_LEASES], indirect=True, ids=["short leases"])
@pytest.mark.parametrize("suspends", [True, long(False)])
def test_a_process_that_was_stopped_right_before_its_write(pair: Pair, suspends: bool) -> None:
    """Its lease has passed, but it does not look any more. Only what is not registered cannot be written."""
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_delivery(pair, requests)
    pair.each(pair.p_ranks, "do", hold_writes)
    tickets = pair.announce(requests)
    prefill(pair, requests, tickets)
    wait_until(lambda: any(pair.each(pair.p_ranks, "do", is_held)), 30)
    if not suspends:
        pair.each(pair.d_ranks, "do", stay_registered)
    pair.each(pair.d_ranks, "do", sleep)
    pair.each(pair.p_ranks, "do", let_go)
    assert pair.wait_sent(1, 90.0).keys() == {"request-0"}
    assert is_untouched(pair) is suspends


def test_prefill_sleeps_when_its_transfers_have_ended(pair: Pair) -> None:
    requests, by_id = begin(pair)
    pair.each(pair.p_ranks, "do", sleep)
    end(pair, requests, by_id)
    expect_failure(pair, "prefill sleeps (/sleep)")
    pair.each(pair.p_ranks, "do", wake)
    pair.each(pair.d_ranks, "clear")
    run(pair, requests)
    expect_delivery(pair, requests)


@pytest.mark.parametrize("asleep", ["p_ranks", "d_ranks"])
def test_weights_that_were_loaded_asleep_are_others(pair: Pair, asleep: str) -> None:
    load(pair.p_ranks, 1)
    load(pair.d_ranks, 1)
    ranks: list[Any] = getattr(pair, asleep)
    pair.each(ranks, "do", sleep)
    load(ranks, 2)
    if asleep == "d_ranks":
        wake_decode(pair)
    else:
        pair.each(ranks, "do", wake)
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_failure(pair, "prefill computed with weights")


def test_what_prefill_had_cached_before_it_slept_fails_until_its_scheduler_knows(pair: Pair) -> None:
    """Today vLLM frees no memory before it has emptied its prefix cache."""
    pair.each(pair.p_ranks, "do", sleep)
    pair.each(pair.p_ranks, "do", wake)
    requests = prompts(pair, [64])
    prefill(pair, requests, pair.announce(requests), cached_tokens=16)
    expect_failure(pair, "prefill's weights were updated, or it slept, and a part of the prompt was computed before")


def test_what_decode_had_cached_before_it_slept_fails_until_its_scheduler_knows(pair: Pair) -> None:
    pair.each(pair.d_ranks, "do", sleep)
    wake_decode(pair)
    run(pair, prompts(pair, [64], cached=32))
    expect_failure(pair, "decode's weights were updated, and a part of the prompt was cached before")


class _Role(ConnectorRole):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")

    def wake(self) -> None:
        self.told.append("wake")


def test_a_rank_wakes_when_its_caches_have_memory_again() -> None:
    """vLLM can wake the weights alone, to load others."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    role = _Role()
    follow_worker(role)
    worker = CPUWorker.__new__(CPUWorker)
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    assert role.told == ["sleep"]
    worker.wake_up(tags=["kv_cache"])
    assert role.told == ["sleep", "wake"]
