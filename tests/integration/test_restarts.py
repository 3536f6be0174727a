# SPDX-License-Identifier: Apache-2.0
"""Engines that end, and others that come up in their place: no byte goes astray, no request hangs, nothing is kept of
engines that are gone. Real processes, killed with SIGKILL."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from harness.kv import HEAD_MAJOR, Prompt, Side
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, Pair, expect_delivery, expect_failure, pair_of_each, prefill, prompts, run
from harness.waiting import wait_until
from vllm_ascend_pd.core.step import PrefillStep, Send

PATIENCE_S = 60.0
CONFIG = {"lease_s": 6.0, "write_timeout_s": 3.0, "control_timeout_s": 2.0, "grant_timeout_s": 2 * PATIENCE_S}
"""Whoever finds out only at the end of `grant_timeout_s` is too late for these tests."""

SHAPES = {"direct": (HEAD_MAJOR, Side(1), Side(1), CONFIG)}


pair = pair_of_each(SHAPES, scope="function", afresh=True)


def delivers(pair: Pair, requests: list[Prompt]) -> None:
    run(pair, requests)
    expect_delivery(pair, requests, PATIENCE_S)


def remembered(rank: PrefillRank) -> set[str]:
    return {engine_id for _, engine_id in list(rank.worker._control._engines)}


def resources(rank: PrefillRank) -> tuple[int, int]:
    """Threads that send, and connections to decode's listeners and ranks."""
    sending = [thread for thread in threading.enumerate() if thread.name.startswith("pd-sender")]
    return len(sending), len(rank.worker._control._client._dealers)


def on_prefill(pair: Pair, action: Callable[..., Any], *args: Any) -> list[Any]:
    """`action(rank, *args)` of each prefill rank."""
    return pair.each(pair.p_ranks, "do", action, *args)


def knows(pair: Pair) -> set[str]:
    """Decode engines that any prefill rank remembers."""
    return set().union(*on_prefill(pair, remembered))


def test_a_decode_engine_in_anothers_place(pair: Pair) -> None:
    """Twice: what prefill knew of the first is gone by then, so nothing piles up."""
    delivers(pair, prompts(pair, [40, 50]))
    before = on_prefill(pair, resources)
    for engine_id in ("second", "third"):
        pair.restart_decode(engine_id)
        delivers(pair, prompts(pair, [60, 17], seed=len(engine_id)))
        wait_until(lambda engine_id=engine_id: knows(pair) == {engine_id}, PATIENCE_S)
        wait_until(lambda: on_prefill(pair, resources) == before, PATIENCE_S)


def test_decode_that_dies_while_it_is_written_to(pair: Pair) -> None:
    """What was on its way to the old engine does not reach the new one."""
    old = prompts(pair, [64, 96])
    tickets = pair.announce(old)
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets), {p.request_id: p for p in old})
    pair.wait_granted(PATIENCE_S)
    pair.each(pair.p_ranks, "slow_down", 2.0)
    prefill(pair, old, {})
    pair.restart_decode("second")
    assert pair.wait_sent(2, PATIENCE_S).keys() == {p.request_id for p in old}
    assert pair.differences([]) == []
    pair.each(pair.p_ranks, "slow_down", 0.0)
    delivers(pair, prompts(pair, [50], seed=5))


def test_meeting_an_engine_ends_the_transfers_of_the_one_before_it(pair: Pair) -> None:
    before = on_prefill(pair, resources)
    [old, unmet, new] = prompts(pair, [64, 64, 64])
    tickets = {p.request_id: pair.ticket(p) for p in (old, unmet)}
    pair.expect([old], tickets)
    by_id = {p.request_id: p for p in (old, unmet, new)}
    step = PrefillStep(tickets={old.request_id: tickets[old.request_id]})
    pair.each(pair.p_ranks, "step", step, by_id)
    pair.wait_granted(PATIENCE_S)
    pair.restart_decode("second")
    run(pair, [new])
    assert pair.wait_arrivals(1, PATIENCE_S) == ({new.request_id}, {})
    assert pair.wait_sent(1, PATIENCE_S) == {}
    # A ticket that comes late, while the old engine's last transfer is still being computed.
    prefill(pair, [unmet], {unmet.request_id: tickets[unmet.request_id]})
    prefill(pair, [old], {})
    failed = pair.wait_sent(2, PATIENCE_S)
    assert all("engine decode has ended: second is at its address now" in failed[p.request_id] for p in (old, unmet)), (
        failed
    )
    assert pair.differences([new]) == []
    wait_until(lambda: knows(pair) == {"second"}, PATIENCE_S)
    known = 1 + len(pair.d_ranks)  # a listener and its ranks
    wait_until(
        lambda: on_prefill(pair, resources) == [(sent + 1, opened + known) for sent, opened in before], PATIENCE_S
    )


def test_tickets_that_name_engines_that_never_were(pair: Pair) -> None:
    """Each gets a thread and a connection, but only for as long as its request runs."""
    delivers(pair, prompts(pair, [40]))
    before = on_prefill(pair, resources)
    requests = prompts(pair, [10] * 24)  # more answers than a listener keeps unread
    tickets = {
        p.request_id: msgspec.structs.replace(pair.ticket(p), remote_engine_id=f"nobody-{p.request_id}")
        for p in requests
    }
    prefill(pair, requests, tickets)
    failed = pair.wait_sent(len(requests), PATIENCE_S)
    assert all(f"nobody-{p.request_id} is not here" in failed[p.request_id] for p in requests)
    wait_until(lambda: on_prefill(pair, resources) == before, PATIENCE_S)
    assert knows(pair) == {"decode"}


def test_preempted_while_a_failed_write_may_still_arrive(make_pair: MakePair) -> None:
    """Its retry got through, but what the first attempt left behind would read the blocks' next content, and deliver
    that (R3): decode must not start. A preemption that meets no such write does no harm."""
    pair = make_pair(HEAD_MAJOR, Side(1), Side(1), {**CONFIG, "lease_s": 60.0})
    [p_rank], [d_rank] = pair.p_ranks, pair.d_ranks
    [prompt] = prompts(pair, [48])
    by_id = {prompt.request_id: prompt}
    tickets = {prompt.request_id: pair.ticket(prompt)}

    def send(block: int, **more: Any) -> None:
        part = Send(prompt.request_id, 16 * block, 16 * block + 16, ([prompt.p_blocks[block]],), last=block == 2)
        p_rank.call("step", PrefillStep(sends=[part], **more), by_id)

    try:
        pair.expect([prompt], tickets)
        send(0, tickets=tickets)
        p_rank.call("step", PrefillStep(preempted={prompt.request_id}), by_id)
        assert pair.p_ranks[0].call("sent") == (set(), {})
        d_rank.freeze()
        send(1)
        wait_until(lambda: any("trying each request by itself" in text for text in p_rank.call("warnings")), PATIENCE_S)
        d_rank.freeze(False)
        p_rank.call("step", PrefillStep(preempted={prompt.request_id}), by_id)
        send(2)
        p_rank.call("step", PrefillStep(finished={prompt.request_id: None}), by_id)
        expect_failure(pair, "preempted while a failed write", timeout_s=PATIENCE_S)
    finally:
        d_rank.freeze(False)
