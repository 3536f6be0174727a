# SPDX-License-Identifier: Apache-2.0
"""Batches in Mooncake's pool: never more than it has threads, one to a peer, and room left for peers that are well."""

import threading
import time

import pytest

from vllm_ascend_pd.transport.ascend_writer import Slots


def proven(size: int, *sessions: str) -> Slots:
    slots = Slots(size, max(1, size // 2))
    for session in sessions:
        slots.proved(session, well=True)
    return slots


def taken(slots: Slots, *sessions: str) -> list[bool]:
    return [slots.take(session, 0.0) for session in sessions]


def test_never_more_than_there_are() -> None:
    slots = proven(3, *"abcd")
    assert taken(slots, *"abcd") == [True, True, True, False]
    slots.give_back("b")
    assert taken(slots, "d") == [True]


def test_one_to_a_peer() -> None:
    slots = proven(4, "a")
    assert taken(slots, "a", "a") == [True, False]
    slots.give_back("a")
    assert taken(slots, "a") == [True]


def test_unproven_peers_share_a_part_of_them() -> None:
    slots = proven(4, *"wx")
    assert taken(slots, *"abcwx") == [True, True, False, True, True]
    slots.give_back("a")
    assert taken(slots, "c") == [True]


def test_one_slot_serves_unproven_peers_too() -> None:
    slots = Slots(1, 1)
    assert taken(slots, *"ab") == [True, False]


def test_a_peer_is_proven_by_what_arrives_until_something_fails() -> None:
    slots = proven(4, "a")
    assert taken(slots, *"bcd") == [True, True, False]
    assert slots.is_free("a")
    slots.proved("a", well=False)
    assert not slots.is_free("a")
    slots.proved("a", well=True)
    assert slots.is_free("a")
    slots.forget(["a"])
    assert not slots.is_free("a")


def test_a_peer_counts_as_it_was_when_its_batch_began() -> None:
    slots = proven(4, "a")
    assert taken(slots, "a", "b") == [True, True]
    slots.proved("a", well=False)
    assert taken(slots, "c", "d") == [True, False]


@pytest.mark.parametrize("given_back", [True, False])
def test_who_waits_gets_what_is_given_back_within_its_time(given_back: bool) -> None:
    slots = proven(1, *"ab")
    assert slots.take("a", 0.0)
    if given_back:
        threading.Timer(0.05, slots.give_back, ["a"]).start()
    begun = time.monotonic()
    assert slots.take("b", 0.3) == given_back
    assert (time.monotonic() - begun < 0.25) == given_back
