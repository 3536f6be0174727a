# SPDX-License-Identifier: Apache-2.0
"""Places at engines: never more than the limit, in turn, and none lost, whoever leaves when."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from vllm_ascend_pd.proxy.routing.registry import Engine, Engines, Gate, Record, Role
from vllm_ascend_pd.proxy.routing.seats import Full, Party, Seats

FOREVER = 60.0
FULL = "full"


def engine(url: str) -> Engine:
    return Engine(Role.DECODE, url, Gate(3, 2), Record(3))


async def take(seats: Seats, engines: list[Engine], **options: Any) -> Engine | str | None:
    try:
        return await seats.take(engines, **options)
    except Full:
        return FULL


async def settle() -> None:
    for _ in range(10):
        await anyio.sleep(0)


def test_best_free_engine_first() -> None:
    async def run() -> None:
        a, b, seats = engine("a"), engine("b"), Seats(1, 0, FOREVER)
        assert await seats.take([a, b]) is a
        assert await seats.take([a, b]) is b
        assert await take(seats, [a, b]) is FULL  # nobody may wait
        with seats.held(a):
            pass
        assert await seats.take([b, a]) is a

    anyio.run(run)


def test_who_waits_is_served_in_turn_at_whichever_engine_has_a_place() -> None:
    async def run() -> None:
        a, b, seats = engine("a"), engine("b"), Seats(1, 2, FOREVER)
        assert [await seats.take([a, b]), await seats.take([a, b])] == [a, b]
        got: list[tuple[int, Engine | None]] = []

        async def wait(number: int, engines: list[Engine]) -> None:
            got.append((number, await seats.take(engines)))

        async with anyio.create_task_group() as tasks:
            for number, engines in enumerate(([a], [a, b], [a, b])):
                tasks.start_soon(wait, number, engines)
                await settle()
            assert seats.waiting == 3
            with seats.held(b):
                pass
            await settle()
            with seats.held(a):
                pass
            await settle()
            assert got == [(1, b), (0, a)]
            a.draining = True
            with seats.held(a):
                pass
            await settle()
            assert len(got) == 2
            a.draining = False
            seats.call(a)
            await settle()
            assert got[2:] == [(2, a)]

    anyio.run(run)


def test_who_had_a_place_before_is_called_before_the_line_be_it_full_or_not() -> None:
    async def run() -> None:
        a, seats = engine("a"), Seats(1, 2, FOREVER)
        assert await seats.take([a]) is a
        got: list[str] = []

        async def wait(name: str, admitted: bool) -> None:
            assert await seats.take([a], admitted) is a
            got.append(name)

        async with anyio.create_task_group() as tasks:
            for name, admitted in (("new", False), ("newer", False), ("again", True), ("again later", True)):
                tasks.start_soon(wait, name, admitted)
                await settle()
            assert seats.waiting == 4
            assert await take(seats, [a]) is FULL
            for _ in range(4):
                with seats.held(a):
                    pass
                await settle()
        assert got == ["again", "again later", "new", "newer"]

    anyio.run(run)


def test_parties_have_one_place_in_the_line_and_take_turns() -> None:
    async def run() -> None:
        a, seats = engine("a"), Seats(1, 2, FOREVER)
        first, second, third = Party(), Party(), Party()
        assert await seats.take([a]) is a
        got: list[str] = []

        async def wait(name: str, party: Party) -> None:
            assert await seats.take([a], party=party) is a
            got.append(name)

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(wait, f"first {number}", first)
            await settle()
            tasks.start_soon(wait, "second 0", second)
            await settle()
            assert await take(seats, [a], party=third) is FULL  # two parties wait
            tasks.start_soon(wait, "second 1", second)
            await settle()
            assert seats.waiting == 5
            with seats.held(a):
                pass
            await settle()
            tasks.start_soon(wait, "third", third)  # those of one that had a place do not count
            await settle()
            assert seats.waiting == 5
            for _ in range(5):
                with seats.held(a):
                    pass
                await settle()
        assert got == ["first 0", "second 0", "first 1", "third", "second 1", "first 2"]
        assert seats.waiting == 0

    anyio.run(run)


def test_who_came_with_one_that_had_a_place_waits_as_long_as_it_takes() -> None:
    async def run() -> None:
        a, seats, party = engine("a"), Seats(1, 1, 0.05), Party()
        assert await seats.take([a]) is a
        results: list[Engine | str | None] = []

        async def wait(party: Party) -> None:
            results.append(await take(seats, [a], party=party))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait, party)
            await settle()
            with seats.held(a):
                pass
            await settle()
            assert results == [a]
            tasks.start_soon(wait, Party())
            await anyio.sleep(0.2)
            assert results == [a, FULL]
            for _ in range(2):
                with seats.held(a):
                    pass
                await settle()
        assert results == [a, FULL, a, a]

    anyio.run(run)


def test_who_waits_may_go_to_an_engine_that_joins() -> None:
    """Whether it is new, or was not to be asked for a while; but not to one that failed it."""

    async def run() -> None:
        a, b, seats = engine("a"), engine("b"), Seats(1, 3, FOREVER)
        assert await seats.take([a]) is a
        got: list[tuple[str, Engine | None]] = []

        async def wait(name: str, *avoid: str) -> None:
            got.append((name, await seats.take([a], avoid=avoid)))

        async with anyio.create_task_group() as tasks:
            for name, *avoid in (("failed at b", "b"), ("first",), ("second",)):
                tasks.start_soon(wait, name, *avoid)
                await settle()
            seats.join(b)
            await settle()
            assert got == [("first", b)]
            a.removed = True
            with seats.held(a):
                pass
            with seats.held(b):
                pass
            await settle()
            assert got[1:] == [("second", b)]
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_who_has_no_engine_left_to_wait_for_does_not_wait() -> None:
    """Removed, or drained: both at once are gone for those in line."""

    async def run() -> None:
        engines, seats = Engines(Role.DECODE), Seats(1, 3, FOREVER)
        engines.on_closed = seats.closed
        a, b = engines.add("http://a", "a test"), engines.add("http://b", "a test")
        party = Party()
        assert [await seats.take([each], party=party) for each in (a, b)] == [a, b]
        got: list[tuple[str, Engine | None]] = []

        async def wait(name: str, engines: list[Engine], party: Party | None = None) -> None:
            got.append((name, await seats.take(engines, party=party)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "a alone", [a])
            tasks.start_soon(wait, "a alone, with others", [a], party)
            tasks.start_soon(wait, "either", [a, b])
            await settle()
            engines.remove(a)
            await settle()
            assert got == [("a alone", None), ("a alone, with others", None)]
            engines.drain(b)
            await settle()
            assert got[2:] == [("either", None)]
        assert await seats.take([b]) is None

    anyio.run(run)


@pytest.mark.parametrize("patience", [FOREVER, 0.05])
def test_who_was_called_to_an_engine_that_is_removed_before_it_goes_there_waits_on(patience: float) -> None:
    async def run() -> None:
        engines, seats = Engines(Role.DECODE), Seats(1, 3, patience)
        engines.on_closed = seats.closed
        a, b = engines.add("http://a", "a test"), engines.add("http://b", "a test")
        assert [await seats.take([a]), await seats.take([b])] == [a, b]
        got: list[Engine | str | None] = []

        async def wait(engines: list[Engine]) -> None:
            got.append(await take(seats, engines))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, [a, b])
            tasks.start_soon(wait, [a])
            await settle()
            with seats.held(a):
                pass
            assert seats.taken(a) == 1
            engines.remove(a)
            await settle()
            assert (got, seats.waiting, seats.taken(a)) == ([None], 1, 0)
            if patience is FOREVER:
                with seats.held(b):
                    pass
        assert got == [None, b if patience is FOREVER else FULL]

    anyio.run(run)


def test_engine_whose_checks_fail_joins_when_they_are_good_not_when_it_is_let_in_again() -> None:
    engines, joined = Engines(Role.DECODE, eject_after=1, return_after=1), []
    engines.on_open = joined.append
    engines.replace("a test", ["http://127.0.0.1:1"])
    [one] = engines
    engines.checked(one, "it does not answer")
    engines.drain(one)
    engines.undrain(one)
    assert joined == []
    engines.checked(one, None)
    assert joined == [one]


def test_line_and_patience_are_bounded() -> None:
    async def run() -> None:
        a, seats = engine("a"), Seats(1, 1, 0.05)
        assert await seats.take([a]) is a
        results: list[Engine | str | None] = []

        async def wait() -> None:
            results.append(await take(seats, [a]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await settle()
            assert await take(seats, [a]) is FULL
            assert results == []
        assert results == [FULL]
        assert seats.waiting == 0

    anyio.run(run)


@pytest.mark.parametrize("seed", range(5))
def test_no_place_is_lost_or_given_twice(seed: int) -> None:
    """Requests that come, give up at any moment, and end."""
    chance = random.Random(seed)
    engines = [engine(url) for url in "abc"]
    seats = Seats(2, 5, 0.02)
    now = dict.fromkeys(engines, 0)
    parties = [Party() for _ in range(100)]
    outcomes = {"served": 0, "refused": 0, "left": 0}

    async def request() -> None:
        await anyio.sleep(chance.uniform(0, 0.2))
        with anyio.move_on_after(chance.uniform(0, 0.04)) as scope:
            asked = chance.sample(engines, chance.randint(1, 3))
            try:
                given = await seats.take(asked, party=chance.choice([None, *parties]))
            except Full:
                outcomes["refused"] += 1
                return
            assert given is not None
            with seats.held(given):
                now[given] += 1
                assert now[given] <= 2
                try:
                    await anyio.sleep(chance.uniform(0, 0.02))
                finally:
                    now[given] -= 1
            outcomes["served"] += 1
        outcomes["left"] += scope.cancelled_caught

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(request)
        assert seats.waiting == 0
        for each in engines:
            assert [await seats.take([each]) for _ in range(2)] == [each, each]
        assert await seats.take([]) is None

    anyio.run(run)
    assert sum(outcomes.values()) >= 300
    assert outcomes["served"]
    assert outcomes["left"]


def test_a_free_place_is_offered_to_who_has_lost_one() -> None:
    """In one turn of the event loop: called to A, nobody to B, and A is removed."""

    async def run() -> None:
        engines, seats = Engines(Role.PREFILL), Seats(1, 3, FOREVER)
        engines.on_closed, engines.on_open = seats.closed, seats.join
        a, b = engines.add("http://a", "test"), engines.add("http://b", "test")
        assert [await seats.take([a]), await seats.take([b])] == [a, b]
        got: list[Engine | None] = []

        async def wait() -> None:
            got.append(await seats.take([a, b]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await settle()
            with seats.held(a):
                pass
            with seats.held(b):
                pass
            engines.remove(a)
            await settle()
            assert got == [b]
        assert (seats.taken(a), seats.taken(b), seats.waiting) == (0, 1, 0)

    anyio.run(run)
