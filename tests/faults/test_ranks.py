# SPDX-License-Identifier: Apache-2.0
"""Ranks without a model, over a token-major cache whose heads are regrouped: what one rank's end does to the others of
its regroup group. Requests end within their deadline on every rank, and another engine serves the next ones into the
same blocks, where no late byte lands."""

import time
from collections.abc import Iterator

import pytest

from faults.report import Report, Row
from harness.kv import Model, Side
from harness.rank_programs import PrefillRank
from harness.ranks import Pair, prompts, run

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
    run(pair, prompts(pair, [64]))
    assert pair.wait_arrivals(1) == ({"request-0"}, {})
    assert pair.wait_sent(1) == {}
    pair.each(pair.d_ranks, "clear")

    pair.each(pair.p_ranks, "do", push_slowly)
    requests = prompts(pair, [40 + 8 * i for i in range(REQUESTS)], seed=10)
    run(pair, requests)  # returns once all is queued
    time.sleep(0.2)  # into the first layers
    pair.kill(pair.p_ranks[1])
    received, failed = pair.wait_arrivals(REQUESTS, DEADLINE_S)
    assert len(received) + len(failed) == REQUESTS
    assert all(failed.values())
    assert pair.wait_sent(REQUESTS, DEADLINE_S).keys() >= failed.keys()  # the other rank, too
    wrong = [
        what for what in pair.differences([p for p in requests if p.request_id in received]) if "nobody" not in what
    ]

    pair.each(pair.d_ranks, "clear")
    pair.restart_prefill("prefill-2")
    ready = time.monotonic()
    run(pair, again := prompts(pair, [40 + 8 * i for i in range(REQUESTS)], seed=20))
    assert pair.wait_arrivals(REQUESTS) == ({prompt.request_id for prompt in again}, {})
    recovery_s = time.monotonic() - ready
    assert pair.wait_sent(REQUESTS) == {}
    time.sleep(3.0)  # for bytes that should not come
    differences = pair.differences(again)

    outcomes = {"right": len(received) - len(wrong), "failed cleanly": len(failed), "wrong": len(wrong)}
    where = "ranks without a model, TP 2 to TP 1, heads regrouped"
    report.rows.append(Row(2, "one rank of a regroup group killed", where, outcomes, 0, {}, recovery_s))
    assert wrong == []
    assert differences == []
