# SPDX-License-Identifier: Apache-2.0
"""Ranks that begin anew after failed collectives stay aligned: checked for all orders of events, within bounds (R5)."""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import pytest
from explore import Wrong, explore

from vllm_ascend_pd.core.generations import Generation, Membership, first_generation


@dataclass(frozen=True)
class RankState:
    """`at`: the collective it has come to. `running`: it is in that one, in its generation; else `asking`: it has come
    to a step that it may not pass without having seen the record. `read`: what a look at the record found, `asked`:
    the step it was for, 0 for a look by the way."""

    member: tuple[object, ...]
    at: int = 0
    running: int | None = None
    asking: bool = False
    read: Generation | None = None
    asked: int = 0
    ran: tuple[tuple[int, int], ...] = ()  # (generation, collective)

    def membership(self, kind: type[Membership]) -> Membership:
        return kind(*self.member)  # type: ignore[arg-type]


@dataclass(frozen=True)
class World:
    """`steps` steps of `per_step` collectives each; `faults` that may still happen."""

    ranks: tuple[RankState, ...]
    record: Generation
    faults: int
    steps: int
    per_step: int

    def step_of(self, rank: RankState) -> int:
        return rank.at // self.per_step + 1

    def having(self, place: int, rank: RankState, **changes: object) -> "World":
        ranks = (*self.ranks[:place], rank, *self.ranks[place + 1 :])
        return replace(self, ranks=ranks, **changes)  # type: ignore[arg-type]


def world(size: int, faults: int, steps: int, per_step: int) -> World:
    ranks = tuple(RankState(astuple(Membership(place))) for place in range(size))
    return World(ranks, first_generation(size), faults, steps, per_step)


def moves(now: World, kind: type[Membership]) -> Iterator[tuple[str, World]]:
    for place, rank in enumerate(now.ranks):
        for label, after in _moves_of(now, place, rank, kind):
            yield f"rank {place}: {label}", after


def _moves_of(now: World, place: int, rank: RankState, kind: type[Membership]) -> Iterator[tuple[str, World]]:
    yield from _looks(now, place, rank, kind)
    member = rank.membership(kind)
    if rank.running is not None:
        yield from _ends(now, place, rank, member)
    elif rank.asking:
        if now.faults:  # the store does not answer in time; a look that is under way goes on
            member.miss(now.step_of(rank), "")
            passed = replace(rank, member=astuple(member), at=rank.at + 1, asking=False)
            yield f"gives up asking at {rank.at}", now.having(place, passed, faults=now.faults - 1)
    elif rank.at < now.steps * now.per_step:
        if now.faults:
            missing = rank.membership(kind)
            missing.miss(now.step_of(rank), "")
            missed = replace(rank, member=astuple(missing), at=rank.at + 1)
            yield f"misses {rank.at}", now.having(place, missed, faults=now.faults - 1)
        answer = member.begin(now.step_of(rank))
        if answer is None:
            yield f"must ask at {rank.at}", now.having(place, replace(rank, asking=True))
        elif answer:
            run = (member.generation, rank.at)
            begun = replace(rank, member=astuple(member), running=member.generation, ran=(*rank.ran, run))
            yield f"begins {rank.at} in generation {member.generation}", now.having(place, begun)
        else:
            passed = replace(rank, member=astuple(member), at=rank.at + 1)
            yield f"passes {rank.at} by", now.having(place, passed)


def _looks(now: World, place: int, rank: RankState, kind: type[Membership]) -> Iterator[tuple[str, World]]:
    """Its other thread reads the record and changes it, each a step by itself, beside whatever the rank does."""
    if rank.read is None:
        asked = now.step_of(rank) if rank.asking else 0
        wants = rank.membership(kind).see(now.record, asked)
        known = replace(rank, read=now.record, asked=asked)
        member = rank.membership(kind)
        member.see(now.record, asked)
        if rank.asking or wants is not None or astuple(member) != rank.member:  # else nothing would follow
            yield "reads the record", now.having(place, known)
        return
    member = rank.membership(kind)
    wanted = member.see(rank.read, rank.asked)
    if wanted is None:
        done = replace(rank, member=astuple(member), read=None, asked=0)
        if rank.asking and rank.asked == now.step_of(rank):
            done = replace(done, asking=False)
        yield "has nothing to write", now.having(place, done)
    else:
        swapped = wanted if now.record == rank.read else now.record
        after = replace(rank, member=astuple(member), read=swapped)
        yield f"writes {wanted}" if swapped is wanted else "is too late", now.having(place, after, record=swapped)


def _ends(now: World, place: int, rank: RankState, member: Membership) -> Iterator[tuple[str, World]]:
    run = (rank.running, rank.at)
    others = [other for i, other in enumerate(now.ranks) if i != place]
    after = replace(rank, at=rank.at + 1, running=None)
    if all(run in other.ran for other in others):
        yield f"ends {rank.at}", now.having(place, after)
    assert rank.running is not None
    member.failed(rank.running, "")
    failed = replace(after, member=astuple(member))
    left = any(other.member[1] != rank.running or other.member[3] is not None for other in others)
    if left:
        yield f"fails in {rank.at}, as another has left", now.having(place, failed)
    elif now.faults:
        yield f"fails in {rank.at}", now.having(place, failed, faults=now.faults - 1)


def wrong(now: World, kind: type[Membership]) -> str | None:
    """Whatever meets within a generation is the same on all ranks; in the end all are in one generation."""
    generations = {generation for rank in now.ranks for generation, _ in rank.ran}
    for generation in generations:
        runs = [[at for of, at in rank.ran if of == generation] for rank in now.ranks]
        for one, other in itertools.combinations(runs, 2):
            if any(a != b for a, b in zip(one, other, strict=False)):
                return f"generation {generation}: {one} meet {other}"
    if next(moves(now, kind), None) is None:
        if any(rank.at < now.steps * now.per_step for rank in now.ranks):
            return "hangs"
        if any(rank.member[3] is not None for rank in now.ranks) or len({rank.member[1] for rank in now.ranks}) > 1:
            return "stays broken"
    return None


def check(kind: type[Membership], start: World) -> int:
    return explore(start, lambda now: moves(now, kind), lambda now: wrong(now, kind), 400_000).states


@pytest.mark.parametrize("start", [world(2, 2, 3, 1), world(2, 1, 2, 2)], ids=["two-faults", "within-steps"])
def test_all_orders(start: World) -> None:
    assert check(Membership, start) > 20_000


class ForgetsWhatItMissed(Membership):
    def miss(self, step: int, reason: str) -> None:
        self.begun = max(self.begun, step)


class JoinsInTheMiddle(Membership):
    """Takes part in a generation of which it has missed a step."""

    def see(self, seen: Generation, step: int) -> Generation | None:
        begun, self.begun = self.begun, 0
        wanted = super().see(seen, step)
        self.begun = max(begun, self.begun)
        return wanted


@pytest.mark.parametrize("kind", [ForgetsWhatItMissed, JoinsInTheMiddle])
def test_without_a_guard_ranks_meet_in_different_collectives(kind: type[Membership]) -> None:
    with pytest.raises(Wrong, match="meet"):
        check(kind, world(2, 1, 3, 1))


def test_a_generation_opens_at_the_last_of_the_steps_promised() -> None:
    assert Generation(1, (3, 0)).opens_at is None
    assert Generation(1, (3, 5)).opens_at == 5
