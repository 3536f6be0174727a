# SPDX-License-Identifier: Apache-2.0
"""Slots at engines: never more than the limit, given in order, and none lost when requests end at any time."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from proxied import RegistryListener, registry, settings_with

from vllm_ascend_pd.proxy.routing.answers import EngineRole, FailureKind
from vllm_ascend_pd.proxy.routing.dispatch import Attempt, EngineError, EnginePool
from vllm_ascend_pd.proxy.routing.engines import EngineRanking, EngineState, HealthGate, RegisteredEngine
from vllm_ascend_pd.proxy.routing.queue import NoFreeSlotError, Queue
from vllm_ascend_pd.proxy.routing.strategies import UNREAD_PROMPT
from vllm_ascend_pd.transport.names import HostNames

pytestmark = pytest.mark.anyio

FOREVER = 60.0
FULL = "full"


def engine(url: str) -> RegisteredEngine:
    return RegisteredEngine(EngineRole.DECODE, url, HealthGate(3, 2))


class Group:
    """Prefills of one request."""

    slots_given = 0


EngineQueue = Queue[RegisteredEngine]


async def take(queue: EngineQueue, engines: list[RegisteredEngine], **options: Any) -> RegisteredEngine | str | None:
    try:
        return await queue.acquire(engines, **options)
    except NoFreeSlotError:
        return FULL


async def settle() -> None:
    for _ in range(10):
        await anyio.sleep(0)


async def test_waiting_requests_are_served_in_order_at_any_engine_with_a_free_slot() -> None:
    a, b, queue = engine("a"), engine("b"), EngineQueue(1, 2, FOREVER)
    assert [await queue.acquire([a, b]), await queue.acquire([a, b])] == [a, b]
    got: list[tuple[int, RegisteredEngine | None]] = []

    async def wait(number: int, engines: list[RegisteredEngine]) -> None:
        got.append((number, await queue.acquire(engines)))

    async with anyio.create_task_group() as tasks:
        for number, engines in enumerate(([a], [a, b], [a, b])):
            tasks.start_soon(wait, number, engines)
            await settle()
        assert queue.waiting == 3
        queue.release(b)
        await settle()
        queue.release(a)
        await settle()
        assert got == [(1, b), (0, a)]
        a.draining = True
        queue.release(a)
        await settle()
        assert len(got) == 2
        a.draining = False
        queue.opened(a, a.url)
        await settle()
        assert got[2:] == [(2, a)]


async def test_a_readmitted_request_is_served_before_the_queue_even_a_full_one() -> None:
    a, queue = engine("a"), EngineQueue(1, 2, FOREVER)
    assert await queue.acquire([a]) is a
    got: list[str] = []

    async def wait(name: str, admitted: bool) -> None:
        assert await queue.acquire([a], readmitted=admitted) is a
        got.append(name)

    async with anyio.create_task_group() as tasks:
        for name, admitted in (("new", False), ("newer", False), ("again", True), ("again later", True)):
            tasks.start_soon(wait, name, admitted)
            await settle()
        assert queue.waiting == 4
        assert await take(queue, [a]) is FULL
        for _ in range(4):
            queue.release(a)
            await settle()
    assert got == ["again", "again later", "new", "newer"]


async def test_a_group_counts_as_one_in_the_queue_and_groups_take_turns() -> None:
    a, queue = engine("a"), EngineQueue(1, 2, FOREVER)
    first, second, third = Group(), Group(), Group()
    assert await queue.acquire([a]) is a
    got: list[str] = []

    async def wait(name: str, group: Group) -> None:
        assert await queue.acquire([a], group=group) is a
        got.append(name)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, f"first {number}", first)
        await settle()
        tasks.start_soon(wait, "second 0", second)
        await settle()
        assert await take(queue, [a], group=third) is FULL  # two parties wait
        tasks.start_soon(wait, "second 1", second)
        await settle()
        assert queue.waiting == 5
        queue.release(a)
        await settle()
        tasks.start_soon(wait, "third", third)  # those of one that had a slot do not count
        await settle()
        assert queue.waiting == 5
        for _ in range(5):
            queue.release(a)
            await settle()
    assert got == ["first 0", "second 0", "first 1", "third", "second 1", "first 2"]
    assert queue.waiting == 0


async def test_a_waiting_request_may_use_an_engine_that_becomes_available() -> None:
    """The engine may be new or healthy again. An engine at which the request failed is not used."""
    a, b, queue = engine("a"), engine("b"), EngineQueue(1, 3, FOREVER)
    assert await queue.acquire([a]) is a
    got: list[tuple[str, RegisteredEngine | None]] = []

    async def wait(name: str, *avoid: str) -> None:
        got.append((name, await queue.acquire([a], avoid=avoid)))

    async with anyio.create_task_group() as tasks:
        for name, *avoid in (("failed at b", "b"), ("first",), ("second",)):
            tasks.start_soon(wait, name, *avoid)
            await settle()
        queue.opened(b, b.url)
        await settle()
        assert got == [("first", b)]
        a.removed = True
        queue.release(a)
        queue.release(b)
        await settle()
        assert got[1:] == [("failed at b", None), ("second", b)]
        tasks.cancel_scope.cancel()


def test_an_engine_with_failing_checks_opens_when_they_are_good_not_when_undrained() -> None:
    listener = RegistryListener()
    engines = registry(EngineRole.DECODE, listener, eject_after=1, return_after=1)
    engines.replace("a test", ["http://127.0.0.1:1", "http://127.0.0.1:2"])
    [one, _] = engines
    engines.checked(one, "it does not answer")
    engines.drain(one)
    engines.undrain(one)
    assert listener.opened_engines == []
    engines.checked(one, None)
    assert listener.opened_engines == [one]


@pytest.mark.parametrize("in_all", [3, 6])
def test_no_slot_is_lost_or_given_twice(in_all: int) -> None:
    """Requests arrive, are cancelled at any time, and end. Half of them give way to the others."""
    chance = random.Random(in_all)
    engines = [engine(url) for url in "abc"]
    queue = EngineQueue(2, 5, 0.02, in_all)
    now = {way: dict.fromkeys(engines, 0) for way in (False, True)}
    parties = [Group() for _ in range(100)]
    outcomes = {"served": 0, "refused": 0, "left": 0}

    async def request() -> None:
        await anyio.sleep(chance.uniform(0, 0.2))
        with anyio.move_on_after(chance.uniform(0, 0.04)) as scope:
            asked, gives_way = chance.sample(engines, chance.randint(1, 3)), chance.random() < 0.5
            try:
                given = await queue.acquire(asked, group=chance.choice([None, *parties]), gives_way=gives_way)
            except NoFreeSlotError:
                outcomes["refused"] += 1
                return
            assert given is not None
            mine = now[gives_way]
            mine[given] += 1
            assert mine[given] <= 2
            assert sum(sum(each.values()) for each in now.values()) <= in_all
            try:
                await anyio.sleep(chance.uniform(0, 0.02))
            finally:
                mine[given] -= 1
                queue.release(given, gives_way)
                queue.assign()  # it may be called at any time
            outcomes["served"] += 1
        outcomes["left"] += scope.cancelled_caught

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(request)
        assert queue.waiting == 0
        given = Counter([await queue.acquire(engines) for _ in range(in_all)])
        assert sorted(given.values()) == {3: [1, 2], 6: [2, 2, 2]}[in_all]
        assert await queue.acquire([]) is None

    anyio.run(run)
    assert sum(outcomes.values()) >= 300
    assert outcomes["served"]
    assert outcomes["left"]


async def test_a_slot_of_all_engines_together_is_used_at_another_engine() -> None:
    a, b, queue = engine("a"), engine("b"), EngineQueue(None, 2, FOREVER, in_all=1)
    assert await queue.acquire([a]) is a
    waits = asyncio.create_task(queue.acquire([b]))
    await settle()
    queue.release(a)
    assert await waits is b


async def test_requests_that_give_way_keep_no_others_waiting() -> None:
    """They take no slot beyond the limit. Others take as many slots as if those had none."""
    a, queue = engine("a"), EngineQueue(2, 8, FOREVER)
    got: list[str] = []

    async def wait(name: str, gives_way: bool) -> None:
        assert await queue.acquire([a], gives_way=gives_way) is a
        got.append(name)

    async with anyio.create_task_group() as tasks:
        for name in ("intent 0", "intent 1", "intent 2", "intent 3", "ticket 0", "ticket 1", "ticket 2", "ticket 3"):
            tasks.start_soon(wait, name, name.startswith("intent"))
            await settle()
        assert got == ["intent 0", "intent 1", "ticket 0", "ticket 1"]
        queue.release(a)  # of a ticket
        await settle()
        assert got[4:] == ["ticket 2"]
        for _ in range(2):
            queue.release(a, gives_way=True)
            await settle()
        assert got[5:] == [], "two tickets are there"
        queue.release(a)
        await settle()
        assert got[5:] == ["intent 2", "ticket 3"], "in their order"
        assert (a.slots_used, a.giving_way, queue.waiting) == (3, 1, 1)
        tasks.cancel_scope.cancel()


async def test_requests_that_give_way_leave_half_of_the_slots_of_all_engines_together() -> None:
    a, b, queue = engine("a"), engine("b"), EngineQueue(None, 8, FOREVER, in_all=4)
    given = [await queue.acquire([each], gives_way=True) for each in (a, b)]
    third = asyncio.create_task(queue.acquire([a, b], gives_way=True))
    await settle()
    assert given == [a, b]
    assert not third.done()
    assert [await queue.acquire([a]), await queue.acquire([a])] == [a, a]
    queue.release(b, gives_way=True)
    assert await third is a


# --- engines that come and go while requests wait ------------------------------------------------------------


def pool_of_decode(timeout: float = FOREVER, eject_after: int = 3) -> EnginePool:
    """Each engine has one slot."""
    limits = settings_with(max_per_decode=1, queue_per_engine=3, queue_timeout=timeout, eject_after=eject_after)
    return EnginePool(EngineRole.DECODE, limits, HostNames())


@asynccontextmanager
async def waiting(pool: EnginePool, ranking: EngineRanking) -> AsyncIterator[list[RegisteredEngine | None]]:
    """While a request waits for a slot. Yields the list to which it adds its engine."""
    got: list[RegisteredEngine | None] = []

    async def wait() -> None:
        got.append(await pool.acquire(Attempt(), ranking, set(), time.monotonic()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await settle()
        yield got


@pytest.mark.parametrize("at_once", [False, True])
async def test_replaced_engines_do_not_restart_the_queue_timeout(at_once: bool) -> None:
    """`at_once`: for a moment there is no engine."""
    pool = pool_of_decode(timeout=0.3)
    engines = pool.engines
    assert await pool.queue.acquire([engines.add("http://0", "file")]) is not None
    begun = time.monotonic()

    async def replace() -> None:
        for number in range(1, 20):
            await anyio.sleep(0.1)
            url = f"http://{number}"
            if not at_once:
                pool.queue.opened(await taken(engines.add(url, "file")), url)
            engines.replace("file", [url])
            if at_once:
                await taken(engines.add(url, "file"))

    async def taken(engine: RegisteredEngine) -> RegisteredEngine:
        assert await pool.queue.acquire([engine]) is engine  # before anybody is called
        return engine

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replace)
        await settle()
        with pytest.raises(EngineError) as raised:
            await pool.acquire(Attempt(), pool.engines.rank(UNREAD_PROMPT), set(), begun)
        assert raised.value.kind is FailureKind.FULL
        assert time.monotonic() - begun < 1
        tasks.cancel_scope.cancel()


async def test_a_healthy_engine_is_chosen_among_those_that_replace_others() -> None:
    pool = pool_of_decode(eject_after=1)
    engines = pool.engines
    old = engines.add("http://old", "test")
    assert await pool.queue.acquire([old]) is old
    async with waiting(pool, engines.rank(UNREAD_PROMPT)) as got:
        engines.checked(engines.add("http://ejected", "test"), "HTTP 500")
        healthy = engines.add("http://healthy", "test")
        engines.remove(old)
        await settle()
        assert got == [healthy]


async def test_an_engine_that_failed_is_the_last_resort_when_others_are_removed() -> None:
    pool = pool_of_decode()
    engines = pool.engines
    failed, old = engines.add("http://failed", "test"), engines.add("http://old", "test")
    assert await pool.queue.acquire([old]) is old
    async with waiting(pool, engines.rank(UNREAD_PROMPT, {failed.url}, last=[failed.url])) as got:
        engines.remove(old)
        await settle()
        assert got == [failed]


async def test_a_waiting_request_gets_an_ejected_engine_only_if_no_other_is_left() -> None:
    pool = pool_of_decode(eject_after=1)
    engines, queue = pool.engines, pool.queue
    a, b = engines.add("http://a", "test"), engines.add("http://b", "test")
    assert [await queue.acquire([each]) for each in (a, b)] == [a, b]
    ranking = engines.rank(UNREAD_PROMPT)
    async with waiting(pool, ranking) as got, waiting(pool, ranking) as next_got:
        engines.checked(b, "HTTP 503")
        queue.release(b)
        await settle()
        assert got == []
        queue.release(a)
        await settle()
        assert got == [a]
        engines.checked(a, "HTTP 503")
        engines.checked(b, "HTTP 503")
        await settle()
        assert next_got == [b], "none is left"


@pytest.mark.parametrize("is_doubted", [False, True])
async def test_a_waiting_request_gets_an_engine_that_is_passed_over_no_longer(
    monkeypatch: pytest.MonkeyPatch, is_doubted: bool
) -> None:
    """`is_doubted`: it delivers nothing to the request's decode engine."""
    monkeypatch.setattr("vllm_ascend_pd.proxy.routing.engines._PASSED_OVER_SECONDS", 0.1)
    pool = pool_of_decode(eject_after=1)
    engines = pool.engines
    a, b = engines.add("http://a", "test"), engines.add("http://b", "test")
    assert await pool.queue.acquire([a]) is a
    pool.note_request_result(b.url, FailureKind.ERROR)
    async with waiting(pool, engines.rank(UNREAD_PROMPT, doubted=[b.url] if is_doubted else [])) as got:
        engines.checked(b, None)
        await settle()
        assert got == []
        await anyio.sleep(0.15)
        engines.checked(b, None)
        await settle()
        assert got == ([] if is_doubted else [b])
        if is_doubted:
            engines.remove(a)
            await settle()
            assert got == [b], "no other is left"


async def test_a_request_goes_elsewhere_when_the_engine_of_its_new_slot_is_removed() -> None:
    """In one turn of the event loop it gets the slot, another engine has a free slot, and its own is removed."""
    pool = pool_of_decode()
    engines, queue = pool.engines, pool.queue
    a, b = engines.add("http://a", "test"), engines.add("http://b", "test")
    assert [await queue.acquire([each]) for each in (a, b)] == [a, b]
    async with waiting(pool, engines.rank(UNREAD_PROMPT)) as got:
        queue.release(a)
        assert a.slots_used == 1
        engines.remove(a)
        queue.release(b)
        await settle()
        assert got == [b]
    assert (a.slots_used, b.slots_used, queue.waiting) == (0, 1, 0)


async def test_an_engine_that_is_removed_and_added_again_keeps_its_limit() -> None:
    """The requests that it had are still there."""
    pool = pool_of_decode()
    engines, queue = pool.engines, pool.queue
    old = engines.add("http://a", "test")
    assert await queue.acquire([old]) is old
    for source in ("admin", "file"):
        engines.remove(old)
        again = engines.add("http://a", source)
        assert (again.slots_used, again.takes_requests, again.sources) == (1, True, {source})
        assert again.state(0.0)[0] is EngineState.NEW
    async with waiting(pool, engines.rank(UNREAD_PROMPT)) as got:
        assert got == []
        queue.release(old)
        await settle()
        assert got == [again]
    queue.release(again)
    engines.remove(again)
    assert engines.add("http://a", "test") is not again, "nothing of it was left"


async def test_a_prompt_cancelled_as_it_gets_a_slot_does_not_start_its_group() -> None:
    """So the other prompts of its request wait no longer than those of other requests."""
    engines, queue, group = registry(EngineRole.PREFILL), EngineQueue(1, 1, 0.05), Group()
    a = engines.add("http://a", "test")
    assert await queue.acquire([a]) is a
    prompt = asyncio.create_task(queue.acquire([a], group=group))
    await settle()
    queue.release(a)
    assert a.slots_used == 1  # called ...
    prompt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prompt
    assert (group.slots_given, a.slots_used) == (0, 0)
    assert await queue.acquire([a]) is a
    with anyio.fail_after(5), pytest.raises(NoFreeSlotError):
        await queue.acquire([a], group=group)
