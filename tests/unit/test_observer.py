# SPDX-License-Identifier: Apache-2.0
"""One observer tells all listeners, and costs nothing where none listens."""

from vllm_ascend_pd.core.observer import PrefillObserver, tell_all


class Noted(PrefillObserver):
    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def regroup_waited(self, seconds: float) -> None:
        self._notes.append(f"{self._name} {seconds}")


class Closing(Noted):
    def close(self, timeout_s: float) -> None:
        self._notes.append(f"{self._name} closed")


def test_all_listeners_are_told_in_their_order() -> None:
    notes: list[str] = []
    observer = tell_all(PrefillObserver, Noted(notes, "a"), None, Closing(notes, "b"))
    observer.regroup_waited(1.5)
    observer.close(1.0)
    observer.write_retried()
    assert notes == ["a 1.5", "b 1.5", "b closed"]
