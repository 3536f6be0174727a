# SPDX-License-Identifier: Apache-2.0
"""Ranks whose exchange of heads has failed or was missed once: requests under way fail with a reason or arrive right,
later ones fail at once, and the ranks say that the engine must be restarted (R1, R4, R5, R9)."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.kv import GQA, Prompt, Side, layer_name
from harness.pool import long
from harness.rank_hosts import Rank, start_afresh
from harness.rank_programs import PrefillRank, refuse_work
from harness.ranks import Pair, expect_delivery, prompts, run, send_step
from harness.waiting import wait_until
from vllm_ascend_pd.core.step import PrefillStep

IMPATIENT = {"collective_timeout_s": 2.5, "control_timeout_s": 1.0, "lease_s": 6.0, "write_timeout_s": 2.0}
SHAPES = [pytest.param((2, 1), id="TP2_TO_TP1"), long((4, 2), id="TP4_TO_TP2")]
LENGTHS = [16, 40, 100]


@pytest.fixture(params=SHAPES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    p, d = request.param
    start_afresh()
    made = Pair(GQA, Side(p), Side(d), IMPATIENT)
    run(made, prompts(made, LENGTHS))
    expect_delivery(made, prompts(made, LENGTHS))
    yield made
    assert made.close() == []


def stop_before_pushing(rank: PrefillRank, layer: int) -> None:
    """Stops this process by SIGSTOP when the next layer is announced."""
    announce = rank.worker.push_layer

    def late(name: str) -> None:
        if name == layer_name(layer):
            rank.worker.push_layer = announce  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
        announce(name)

    rank.worker.push_layer = late  # type: ignore[method-assign]


def fail_in_collective(rank: PrefillRank) -> None:
    """Makes the next collective fail on this rank alone, before its bytes are sent."""
    exchange = rank.device.all_to_all

    def fail(*_: Any) -> None:
        rank.device.all_to_all = exchange
        raise RuntimeError("injected by the test")

    rank.device.all_to_all = fail


def fail_behind_collective(rank: PrefillRank) -> None:
    """Makes the next collective fail on this rank alone, after the others have got their bytes."""
    exchange = rank.device.all_to_all

    def fail(*args: Any) -> None:
        rank.device.all_to_all = exchange
        exchange(*args)
        raise RuntimeError("injected by the test")

    rank.device.all_to_all = fail


def restarts_needed(pair: Pair) -> list[int]:
    """Returns each prefill rank's metric `restart_needed`."""
    return [rank.call("do", _restart_needed) for rank in pair.p_ranks]


def _restart_needed(rank: PrefillRank) -> int:
    return int(rank.worker.status().restart_needed)


def end(pair: Pair, requests: list[Prompt]) -> set[str]:
    """Waits until every request ends with the right bytes, or with the same reason on both sides. Returns those that
    arrived.
    """
    by_id = {p.request_id: p for p in requests}
    pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id)), by_id)
    received, failed = pair.wait_arrivals(len(requests), 60.0)
    assert received | failed.keys() == by_id.keys()
    for reason in failed.values():
        # Of the rank whose reason came first.
        assert any(part in reason for part in ("all-to-all", "could not be regrouped")), reason
    arrived = [p for p in requests if p.request_id in received]
    assert [d for d in pair.differences(arrived) if "belongs to nobody" not in d] == []
    assert pair.wait_sent(len(requests), 60.0).keys() == failed.keys()
    return received


def expect_broken(pair: Pair, broken: Sequence[Rank], seed: int = 100) -> None:
    """Checks that requests that need the group of the `broken` ranks fail at once on both sides, repeatedly.

    The ranks must say that the engine must be restarted.
    """
    for lap in range(2):
        requests = prompts(pair, LENGTHS, seed=seed * (lap + 1))
        begun = time.monotonic()
        send_step(pair, requests)
        for rank in pair.p_ranks:
            rank.receive()
        assert end(pair, requests) == set()
        assert time.monotonic() - begun < IMPATIENT["collective_timeout_s"], "a broken group is waited for"
    assert restarts_needed(pair) == [int(rank in broken) for rank in pair.p_ranks]


def await_stopped(rank: Rank, timeout_s: float = 30.0) -> None:
    stat = Path(f"/proc/{rank._host.process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", timeout_s)


@pytest.mark.parametrize(("place", "layer"), [(0, 1), (1, 0)], ids=["which-serves-the-store", "another"])
def test_a_rank_that_stands_still(pair: Pair, place: int, layer: int) -> None:
    """It is stopped until the others have given up, and then resumed."""
    group = pair.p_ranks[:2]
    victim, partner = group[place], group[1 - place]
    victim.call("do", stop_before_pushing, layer)
    requests = prompts(pair, LENGTHS, seed=10)
    send_step(pair, requests)
    await_stopped(victim)
    for rank in pair.p_ranks:
        if rank is not victim:
            rank.receive()
    wait_until(partial(partner.call, "open_failures"), 60)  # its partner has given up
    victim.freeze(False)
    victim.receive()
    assert end(pair, requests) == set()
    expect_broken(pair, group)


@pytest.mark.parametrize(("fault", "place"), [(fail_in_collective, 0), (fail_behind_collective, 1), (refuse_work, 0)])
def test_a_collective_that_fails_on_one_rank(pair: Pair, fault: Callable[[PrefillRank], None], place: int) -> None:
    assert restarts_needed(pair) == [0] * len(pair.p_ranks)
    pair.p_ranks[place].call("do", fault)
    requests = prompts(pair, LENGTHS, seed=10)
    send_step(pair, requests)
    for rank in pair.p_ranks:
        rank.receive()
    assert end(pair, requests) == set()
    expect_broken(pair, pair.p_ranks[:2])


def test_a_rank_that_dies(pair: Pair) -> None:
    """Its engine then ends. Until it does, the other ranks' requests end with a reason."""
    victim = pair.p_ranks[0]
    victim.call("do", stop_before_pushing, 1)
    requests = prompts(pair, LENGTHS)
    send_step(pair, requests)
    await_stopped(victim)
    pair.kill(victim)
    for rank in pair.p_ranks:
        rank.receive()
    received, failed = pair.wait_arrivals(len(requests), 60.0)
    assert received == set()
    assert failed.keys() == {p.request_id for p in requests}
    send_step(pair, requests)
    for rank in pair.p_ranks:
        rank.receive()
    received, failed = pair.wait_arrivals(len(requests), 60.0)
    assert received == set()
