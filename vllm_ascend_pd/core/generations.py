# SPDX-License-Identifier: Apache-2.0
"""How ranks whose collectives have failed agree on the step with which they begin anew, without waiting for each other.

Steps are numbered from 1, alike on all ranks, and so are the collectives in them. What the ranks share is one record in
a store that changes by compare-and-set alone: the newest generation of their process group. Each of them promises a
first step, one of which it has begun nothing, and until all have, a rank that must pass that step by raises its promise
first. The last promise opens the generation at the highest step promised: nobody can have passed it by.
"""

from dataclasses import dataclass

import msgspec


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """`promises`: by place in the group, the first step that rank can take part in; 0: not promised yet."""

    number: int
    promises: tuple[int, ...]

    @property
    def opens_at(self) -> int | None:
        """The first step whose collectives run in it; None until all ranks have promised."""
        return max(self.promises) if all(self.promises) else None

    def with_promise(self, place: int, step: int) -> "Generation":
        return Generation(self.number, (*self.promises[:place], step, *self.promises[place + 1 :]))

    def successor(self) -> "Generation":
        return Generation(self.number + 1, (0,) * len(self.promises))


def first_generation(size: int) -> Generation:
    return Generation(0, (1,) * size)


@dataclass
class Membership:
    """One rank, `place` of its group. It is in `generation`, which began with step `opens_at`, unless `failure` says
    why not. `begun`: the last step of which it has begun or missed a collective; `promised`: what it has promised for
    the next generation (0: nothing, as far as it knows)."""

    place: int
    generation: int = 0
    opens_at: int = 1
    failure: str | None = None
    begun: int = 0
    promised: int = 0

    def begin(self, step: int) -> bool | None:
        """A collective of `step` is next: does this rank run it, in its generation? None: it has to see the record
        first. No comes without a promise broken."""
        if self.failure is not None and step >= self.promised:
            return None
        self.begun = max(self.begun, step)
        return self.failure is None and step >= self.opens_at

    def miss(self, step: int, reason: str) -> None:
        """This rank does not run a collective of `step`, whatever it has promised: it is out of the generation to
        which that belongs, also if it will only learn of it."""
        self.begun = max(self.begun, step)
        if step >= self.opens_at:
            self._fail(reason)

    def failed(self, generation: int, reason: str) -> None:
        """A collective of `generation` failed here: who knows what the others have exchanged by now."""
        if generation == self.generation:
            self._fail(reason)

    def see(self, seen: Generation, step: int) -> Generation | None:
        """The record is `seen`; returns what it has to become before this rank can pass `step` by, or None. Ask again
        with what the record is then."""
        if seen.number < self.generation or (seen.number == self.generation and self.failure is None):
            return None
        passed = max(self.begun, step)
        if seen.number == self.generation:
            return seen.successor().with_promise(self.place, passed + 1)
        opens_at = seen.opens_at
        if opens_at is None:
            self._fail("another rank has missed one")
            self.promised = seen.promises[self.place]
            return None if self.promised > passed else seen.with_promise(self.place, passed + 1)
        if opens_at <= self.begun:  # it opened while this rank could not see the record
            self.promised = 0
            return seen.successor().with_promise(self.place, passed + 1)
        self.generation, self.opens_at, self.failure, self.promised = seen.number, opens_at, None, 0
        return None

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure, self.promised = reason, 0
