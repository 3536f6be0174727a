# SPDX-License-Identifier: Apache-2.0
"""Nothing is kept of decode engines that are gone, or never were. Real processes, killed with SIGKILL: tests/simulation
has what was under way when they died."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from harness.kv import HEAD_MAJOR, Prompt, Side
from harness.rank_programs import PrefillRank
from harness.ranks import Pair, expect_delivery, pair_of_each, prefill, prompts, run
from harness.waiting import wait_until

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
