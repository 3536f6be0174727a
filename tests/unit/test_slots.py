# SPDX-License-Identifier: Apache-2.0
"""Batches in Mooncake's pool: never more than it has threads, one to a peer, and room left for peers that are well."""

from vllm_ascend_pd.transport.ascend_writer import Slots


def proven(size: int, *sessions: str) -> Slots:
    slots = Slots(size, max(1, size // 2))
    for session in sessions:
        slots.take(session, 0.0)
        slots.give_back(session, proved=True)
    return slots


def taken(slots: Slots, *sessions: str) -> list[bool]:
    return [slots.take(session, 0.0) for session in sessions]


def test_unproven_peers_share_a_part_of_them() -> None:
    slots = proven(4, *"wx")
    assert taken(slots, *"abcwx") == [True, True, False, True, True]
    slots.give_back("a")
    assert taken(slots, "c") == [True]


def test_a_peer_is_proven_by_what_arrives_until_something_fails() -> None:
    slots = proven(4, "a")
    assert taken(slots, *"abcd") == [True, True, True, False]
    slots.give_back("a", proved=True)
    assert slots.is_free("a")
    slots.forget(["a"])  # as when a batch fails
    assert not slots.is_free("a")
    slots.give_back("b")
    assert taken(slots, "a") == [True]
    slots.give_back("a", proved=True)
    assert taken(slots, *"da") == [True, True]
