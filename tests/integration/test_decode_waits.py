# SPDX-License-Identifier: Apache-2.0
"""Empty steps of decode wait for KV in its ranks, but never delay a step with news."""

import time

from harness.kv import GQA, Side
from harness.rank_programs import DecodeRank
from harness.ranks import MakePair
from vllm_ascend_pd.core.step import DecodeStep, Expect
from vllm_ascend_pd.transport.wakeup import WakeupSocket

LONG_S = 40.0  # of which a step that waits would take all
TIMEOUT_S = 20.0


def steps_behind_an_end(rank: DecodeRank) -> list[set[str]]:
    """Two tickets end one after the other. Returns what each of four steps brought that all may wait."""
    expects = [Expect(f"request-{i}", f"{i:016x}", "digest", [i]) for i in range(2)]
    rank.worker.start_step(DecodeStep(expects=expects))
    brought = []
    for cancelled in ({expects[0].ticket_id: "left"}, {}, {expects[1].ticket_id: "left"}, {}):
        rank.worker.start_step(DecodeStep(cancelled=cancelled, wait_s=LONG_S))
        brought.append(rank.worker.take_arrivals().closed)
    return brought


def test_a_step_after_one_with_news_does_not_wait(make_pair: MakePair) -> None:
    """vLLM may have made it before it got the news, and its next computation is behind that step."""
    pair = make_pair(GQA, Side(1), Side(1))
    began = time.monotonic()
    [brought] = pair.each(pair.d_ranks, "do", steps_behind_an_end)
    assert brought == [{"request-0"}, set(), {"request-1"}, set()]
    assert time.monotonic() - began < TIMEOUT_S


def wakes(rank: DecodeRank) -> tuple[bool, bool, set[str]]:
    """Returns whether each of two tickets wakes the scheduler, and the requests that the steps return. Nobody writes
    for them.

    The first ticket ends while no step waits, the second while a step does.
    """
    wakeup = WakeupSocket()
    expects = [Expect(f"request-{i}", f"{i:016x}", "digest", [i]) for i in range(2)]
    rank.worker.start_step(DecodeStep(expects=expects[:1], wakeup_address=wakeup.address))
    brought = rank.worker.take_arrivals().closed
    first = was_woken(wakeup, LONG_S)
    for _ in range(2):  # behind one that brought something none waits
        rank.worker.start_step(DecodeStep(wakeup_address=wakeup.address))
        brought |= rank.worker.take_arrivals().closed
    wakeup.clear()  # a ticket wakes it when it fails, and again when its blocks are quiet
    rank.worker.start_step(DecodeStep(expects=expects[1:], wait_s=LONG_S, wakeup_address=wakeup.address))
    brought |= rank.worker.take_arrivals().closed
    second = was_woken(wakeup, 0.5)
    wakeup.close()
    return first, second, brought


def was_woken(wakeup: WakeupSocket, timeout_s: float) -> bool:
    began = time.monotonic()
    wakeup.wait(timeout_s)
    woken = time.monotonic() - began < 0.9 * timeout_s
    wakeup.clear()
    return woken


def test_what_ends_while_no_step_waits_wakes_the_scheduler(make_pair: MakePair) -> None:
    pair = make_pair(GQA, Side(1), Side(1), {"queue_timeout_s": 1.0})
    assert pair.each(pair.d_ranks, "do", wakes) == [(True, False, {"request-0", "request-1"})]
