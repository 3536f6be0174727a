# SPDX-License-Identifier: Apache-2.0
"""Every state a model can reach, breadth first: what is found wrong is found on a shortest way."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")


class Wrong(AssertionError):
    """A state that must not be, and how one gets there."""

    def __init__(self, reason: str, trace: list[str]) -> None:
        self.reason = reason
        self.trace = trace
        steps = "\n".join(f"{number:4}. {label}" for number, label in enumerate(trace, 1))
        super().__init__(f"{reason}\n{steps}")


def explore(
    initial: S, moves: Callable[[S], Iterable[tuple[str, S]]], wrong: Callable[[S], str | None], at_most: int
) -> int:
    """Follows `moves(state)`, pairs of a label and the state it leads to, from `initial` to the last state. Returns how
    many states there are. Raises `Wrong` at the first state for which `wrong` has a reason, and when there are more
    than `at_most`."""
    came_from: dict[S, tuple[S, str] | None] = {initial: None}
    layer = [initial]
    while layer:
        following = []
        for state in layer:
            reason = wrong(state)
            if reason is not None:
                raise Wrong(reason, _way(came_from, state))
            for label, successor in moves(state):
                if successor not in came_from:
                    came_from[successor] = (state, label)
                    following.append(successor)
        assert len(came_from) <= at_most, f"more than {at_most} states"
        layer = following
    return len(came_from)


def _way(came_from: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    labels = []
    step = came_from[state]
    while step is not None:
        state, label = step
        labels.append(label)
        step = came_from[state]
    return labels[::-1]


class Numbered(Generic[T]):
    """Objects that change, as numbers: those with the same `key` have the same, and what an event makes of an object
    is worked out once, on a copy."""

    def __init__(self, copy: Callable[[T], T], key: Callable[[T], Hashable]) -> None:
        self._copy = copy
        self._key = key
        self._objects: list[T] = []
        self._numbers: dict[Hashable, int] = {}
        self._after: dict[tuple[int, Hashable], tuple[int, Any]] = {}

    def __getitem__(self, number: int) -> T:
        """To look at, not to change."""
        return self._objects[number]

    def add(self, item: T) -> int:
        number = self._numbers.setdefault(self._key(item), len(self._objects))
        if number == len(self._objects):
            self._objects.append(item)
        return number

    def after(self, number: int, event: Hashable, change: Callable[[T], Any]) -> tuple[int, Any]:
        """What `change(object)` makes of it, and returns. `event` names all that `change` depends on."""
        known = self._after.get((number, event))
        if known is None:
            changed = self._copy(self._objects[number])
            answer = change(changed)
            known = self._after[number, event] = (self.add(changed), answer)
        return known

    def ask(self, number: int, event: Hashable, question: Callable[[T], Any]) -> Any:
        """What `question(object)` returns, whatever it changes."""
        return self.after(number, event, question)[1]
