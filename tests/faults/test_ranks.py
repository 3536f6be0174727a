# SPDX-License-Identifier: Apache-2.0
"""What happens to a regroup group when one of its ranks ends or is stopped: ranks without a model, over a token-major
cache.

Requests end within their deadline on every rank. Another engine serves the next requests into the same blocks, and no
late byte arrives there.
"""

import time
from collections.abc import Iterator

import pytest

from faults.report import Report, Row
from harness.kv import Model, Prompt, Side
from harness.rank_programs import PrefillRank
from harness.ranks import Pair, prompts, run, send_step
from harness.waiting import wait_until
from vllm_ascend_pd.core.step import PrefillStep

pytestmark = pytest.mark.timeout(300)

QUICK = {
    "write_timeout_s": 2.0,
    "collective_timeout_s": 4.0,
    "lease_s": 3.0,
    "settle_timeout_s": 4.0,
    "grant_timeout_s": 4.0,
    "control_timeout_s": 1.0,
}
REQUESTS = 8
LENGTHS = [40 + 8 * i for i in range(REQUESTS)]
DEADLINE_S = 60.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(Model(), Side(2), Side(1), QUICK)
    yield made
    assert made.close() == []


def push_slowly(rank: PrefillRank) -> None:
    rank.slow_down(0.3)


@pytest.mark.long
def test_one_rank_of_a_regroup_group_is_killed(pair: Pair, report: Report) -> None:
    requests = _begin(pair)
    pair.kill(pair.p_ranks[1])
    _expect_restart_to_help(pair, report, "killed", requests)


@pytest.mark.long
def test_one_rank_of_a_regroup_group_is_stopped(pair: Pair, report: Report) -> None:
    """The rank misses a collective, so the group stays broken: later requests fail at once."""
    partner, victim = pair.p_ranks
    _warm_up(pair)
    victim.freeze()
    send_step(pair, requests := prompts(pair, LENGTHS, seed=10))
    partner.receive()
    wait_until(lambda: partner.call("open_failures"), 30)
    victim.freeze(False)
    victim.receive()
    pair.each(pair.p_ranks, "step", PrefillStep(finished={p.request_id: None for p in requests}), {})
    wrong, ended = _end(pair, requests)
    assert (wrong, ended["failed cleanly"] > 0) == ([], True)
    pair.each(pair.d_ranks, "clear")

    begun = time.monotonic()
    run(pair, later := prompts(pair, LENGTHS, seed=15))
    received, failed = pair.wait_arrivals(REQUESTS, DEADLINE_S)
    assert received == set()
    assert all("until this prefill engine is restarted" in why for why in failed.values()), failed
    assert time.monotonic() - begun < QUICK["collective_timeout_s"]
    assert pair.wait_sent(REQUESTS, DEADLINE_S).keys() == failed.keys() == {prompt.request_id for prompt in later}
    _expect_restart_to_help(pair, report, "stopped", [], ended)


def _warm_up(pair: Pair) -> None:
    run(pair, prompts(pair, [64]))
    assert pair.wait_arrivals(1) == ({"request-0"}, {})
    assert pair.wait_sent(1) == {}
    pair.each(pair.d_ranks, "clear")


def _begin(pair: Pair) -> list[Prompt]:
    """Returns requests whose first layers are being pushed."""
    _warm_up(pair)
    pair.each(pair.p_ranks, "do", push_slowly)
    requests = prompts(pair, LENGTHS, seed=10)
    run(pair, requests)  # returns once all is queued
    time.sleep(0.2)  # into the first layers
    return requests


def _end(pair: Pair, requests: list[Prompt]) -> tuple[list[str], dict[str, int]]:
    """Waits until all requests have ended on all ranks, with a reason if they fail. Returns wrong bytes, and how many
    requests ended how.
    """
    if not requests:
        return [], {}
    received, failed = pair.wait_arrivals(len(requests), DEADLINE_S)
    assert len(received) + len(failed) == len(requests)
    assert all(failed.values())
    assert pair.wait_sent(len(requests), DEADLINE_S).keys() >= failed.keys()  # the other rank, too
    arrived = [p for p in requests if p.request_id in received]
    wrong = [what for what in pair.differences(arrived) if "nobody" not in what]
    return wrong, {"right": len(received) - len(wrong), "failed cleanly": len(failed), "wrong": len(wrong)}


def _expect_restart_to_help(
    pair: Pair, report: Report, what: str, requests: list[Prompt], outcomes: dict[str, int] | None = None
) -> None:
    """Ends the requests, unless their `outcomes` are known. Then another engine serves the next ones."""
    wrong, ended = _end(pair, requests)
    outcomes = outcomes or ended
    pair.each(pair.d_ranks, "clear")
    pair.restart_prefill("prefill-2")
    ready = time.monotonic()
    run(pair, again := prompts(pair, LENGTHS, seed=20))
    assert pair.wait_arrivals(REQUESTS) == ({prompt.request_id for prompt in again}, {})
    recovery_s = time.monotonic() - ready
    assert pair.wait_sent(REQUESTS) == {}
    time.sleep(3.0)  # for bytes that should not come
    differences = pair.differences(again)

    where = "ranks without a model, TP 2 to TP 1, heads regrouped"
    report.rows.append(Row(2, f"one rank of a regroup group {what}", where, outcomes, 0, {}, recovery_s))
    assert wrong == []
    assert differences == []
