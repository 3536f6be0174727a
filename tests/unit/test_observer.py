# SPDX-License-Identifier: Apache-2.0
"""One observer tells all listeners."""

from vllm_ascend_pd.core.observer import Observed, Observer, RegroupAwaited, WriteRetried, tell_all


class Noted(Observer):
    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def on(self, event: Observed) -> None:
        self._notes.append(f"{self._name} {type(event).__name__}")

    def close(self, timeout_s: float) -> None:
        self._notes.append(f"{self._name} closed")


def test_all_listeners_are_told_in_their_order() -> None:
    notes: list[str] = []
    observer = tell_all(Noted(notes, "a"), None, Noted(notes, "b"))
    observer.on(RegroupAwaited(1.5))
    observer.close(1.0)
    assert notes == ["a RegroupAwaited", "b RegroupAwaited", "a closed", "b closed"]


def test_one_listener_is_told_without_a_detour() -> None:
    listener = Noted([], "a")
    assert tell_all(None, listener) is listener


def test_nobody_needs_to_listen() -> None:
    tell_all(None).on(WriteRetried())
