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
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter, NoFreeSlotError, RequestGroup
from vllm_ascend_pd.proxy.routing.engine import EngineState, HealthGate, RegisteredEngine
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool
from vllm_ascend_pd.proxy.routing.registry import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import UNREAD_PROMPT
from vllm_ascend_pd.transport.names import HostNames

pytestmark = pytest.mark.anyio

FOREVER = 60.0
FULL = "full"


def engine(url: str) -> RegisteredEngine:
    return RegisteredEngine(EngineRole.DECODE, url, HealthGate(3, 2))


async def take(
    limiter: ConcurrencyLimiter, engines: list[RegisteredEngine], **options: Any
) -> RegisteredEngine | str | None:
    try:
        return await limiter.acquire(engines, **options)
    except NoFreeSlotError:
        return FULL


def request_ends(limiter: ConcurrencyLimiter, at: RegisteredEngine) -> None:
    with limiter.releasing(at):
        pass


async def settle() -> None:
    for _ in range(10):
        await anyio.sleep(0)


async def test_waiting_requests_are_served_in_order_at_any_engine_with_a_free_slot() -> None:
    a, b, limiter = engine("a"), engine("b"), ConcurrencyLimiter(1, 2, FOREVER)
    assert [await limiter.acquire([a, b]), await limiter.acquire([a, b])] == [a, b]
    got: list[tuple[int, RegisteredEngine | None]] = []

    async def wait(number: int, engines: list[RegisteredEngine]) -> None:
        got.append((number, await limiter.acquire(engines)))

    async with anyio.create_task_group() as tasks:
        for number, engines in enumerate(([a], [a, b], [a, b])):
            tasks.start_soon(wait, number, engines)
            await settle()
        assert limiter.waiting == 3
        request_ends(limiter, b)
        await settle()
        request_ends(limiter, a)
        await settle()
        assert got == [(1, b), (0, a)]
        a.draining = True
        request_ends(limiter, a)
        await settle()
        assert len(got) == 2
        a.draining = False
        limiter.assign_slots(a)
        await settle()
        assert got[2:] == [(2, a)]


async def test_a_readmitted_request_is_served_before_the_queue_even_a_full_one() -> None:
    a, limiter = engine("a"), ConcurrencyLimiter(1, 2, FOREVER)
    assert await limiter.acquire([a]) is a
    got: list[str] = []

    async def wait(name: str, admitted: bool) -> None:
        assert await limiter.acquire([a], admitted) is a
        got.append(name)

    async with anyio.create_task_group() as tasks:
        for name, admitted in (("new", False), ("newer", False), ("again", True), ("again later", True)):
            tasks.start_soon(wait, name, admitted)
            await settle()
        assert limiter.waiting == 4
        assert await take(limiter, [a]) is FULL
        for _ in range(4):
            request_ends(limiter, a)
            await settle()
    assert got == ["again", "again later", "new", "newer"]


async def test_a_group_holds_one_place_in_the_queue_and_groups_take_turns() -> None:
    a, limiter = engine("a"), ConcurrencyLimiter(1, 2, FOREVER)
    first, second, third = RequestGroup(), RequestGroup(), RequestGroup()
    assert await limiter.acquire([a]) is a
    got: list[str] = []

    async def wait(name: str, group: RequestGroup) -> None:
        assert await limiter.acquire([a], group=group) is a
        got.append(name)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, f"first {number}", first)
        await settle()
        tasks.start_soon(wait, "second 0", second)
        await settle()
        assert await take(limiter, [a], group=third) is FULL  # two parties wait
        tasks.start_soon(wait, "second 1", second)
        await settle()
        assert limiter.waiting == 5
        request_ends(limiter, a)
        await settle()
        tasks.start_soon(wait, "third", third)  # those of one that had a place do not count
        await settle()
        assert limiter.waiting == 5
        for _ in range(5):
            request_ends(limiter, a)
            await settle()
    assert got == ["first 0", "second 0", "first 1", "third", "second 1", "first 2"]
    assert limiter.waiting == 0


async def test_a_waiting_request_may_use_an_engine_that_becomes_available() -> None:
    """The engine may be new or healthy again. An engine at which the request failed is not used."""
    a, b, limiter = engine("a"), engine("b"), ConcurrencyLimiter(1, 3, FOREVER)
    assert await limiter.acquire([a]) is a
    got: list[tuple[str, RegisteredEngine | None]] = []

    async def wait(name: str, *avoid: str) -> None:
        got.append((name, await limiter.acquire([a], avoid=avoid)))

    async with anyio.create_task_group() as tasks:
        for name, *avoid in (("failed at b", "b"), ("first",), ("second",)):
            tasks.start_soon(wait, name, *avoid)
            await settle()
        limiter.engine_opened(b)
        await settle()
        assert got == [("first", b)]
        a.removed = True
        request_ends(limiter, a)
        request_ends(limiter, b)
        await settle()
        assert got[1:] == [("second", b)]
        tasks.cancel_scope.cancel()


def test_an_engine_with_failing_checks_opens_when_they_are_good_not_when_undrained() -> None:
    listener = RegistryListener()
    engines = registry(EngineRole.DECODE, listener, eject_after=1, return_after=1)
    engines.replace("a test", ["http://127.0.0.1:1"])
    [one] = engines
    engines.checked(one, "it does not answer")
    engines.drain(one)
    engines.undrain(one)
    assert listener.opened == []
    for _ in range(2):  # it opens once
        engines.checked(one, None)
    assert listener.opened == [one]


@pytest.mark.parametrize("in_all", [3, 6])
def test_no_slot_is_lost_or_given_twice(in_all: int) -> None:
    """Requests arrive, are cancelled at any time, and end."""
    chance = random.Random(in_all)
    engines = [engine(url) for url in "abc"]
    limiter = ConcurrencyLimiter(2, 5, 0.02, in_all)
    now = dict.fromkeys(engines, 0)
    parties = [RequestGroup() for _ in range(100)]
    outcomes = {"served": 0, "refused": 0, "left": 0}

    async def request() -> None:
        await anyio.sleep(chance.uniform(0, 0.2))
        with anyio.move_on_after(chance.uniform(0, 0.04)) as scope:
            asked = chance.sample(engines, chance.randint(1, 3))
            try:
                given = await limiter.acquire(asked, group=chance.choice([None, *parties]))
            except NoFreeSlotError:
                outcomes["refused"] += 1
                return
            assert given is not None
            with limiter.releasing(given):
                now[given] += 1
                assert now[given] <= 2
                assert sum(now.values()) <= in_all
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
        assert limiter.waiting == 0
        given = Counter([await limiter.acquire(engines) for _ in range(in_all)])
        assert sorted(given.values()) == {3: [1, 2], 6: [2, 2, 2]}[in_all]
        assert await limiter.acquire([]) is None

    anyio.run(run)
    assert sum(outcomes.values()) >= 300
    assert outcomes["served"]
    assert outcomes["left"]


async def test_a_slot_of_all_engines_together_is_used_at_another_engine() -> None:
    a, b, limiter = engine("a"), engine("b"), ConcurrencyLimiter(None, 2, FOREVER, in_all=1)
    assert await limiter.acquire([a]) is a
    waits = asyncio.create_task(limiter.acquire([b]))
    await settle()
    request_ends(limiter, a)
    assert await waits is b


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
        got.append(await pool.acquire(ranking, set()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await settle()
        yield got


@pytest.mark.parametrize("at_once", [False, True])
async def test_replaced_engines_do_not_restart_the_queue_timeout(at_once: bool) -> None:
    """`at_once`: for a moment there is no engine."""
    pool = pool_of_decode(timeout=0.3)
    engines = pool.engines
    assert await pool.limiter.acquire([engines.add("http://0", "file")]) is not None
    begun = time.monotonic()

    async def replace() -> None:
        for number in range(1, 20):
            await anyio.sleep(0.1)
            url = f"http://{number}"
            if not at_once:
                pool.limiter.engine_opened(await taken(engines.add(url, "file")))
            engines.replace("file", [url])
            if at_once:
                await taken(engines.add(url, "file"))

    async def taken(engine: RegisteredEngine) -> RegisteredEngine:
        assert await pool.limiter.acquire([engine]) is engine  # before anybody is called
        return engine

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replace)
        await settle()
        with pytest.raises(EngineError) as raised:
            await pool.acquire(pool.engines.rank(UNREAD_PROMPT), set())
        assert raised.value.kind is FailureKind.FULL
        assert time.monotonic() - begun < 1
        tasks.cancel_scope.cancel()


async def test_a_healthy_engine_is_chosen_among_those_that_replace_others() -> None:
    pool = pool_of_decode(eject_after=1)
    engines = pool.engines
    old = engines.add("http://old", "test")
    assert await pool.limiter.acquire([old]) is old
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
    assert await pool.limiter.acquire([old]) is old
    async with waiting(pool, engines.rank(UNREAD_PROMPT, {failed.url}).then([failed.url])) as got:
        engines.remove(old)
        await settle()
        assert got == [failed]


async def test_a_request_goes_elsewhere_when_the_engine_of_its_new_slot_is_removed() -> None:
    """In one turn of the event loop it gets the slot, another engine has a free slot, and its own is removed."""
    pool = pool_of_decode()
    engines, limiter = pool.engines, pool.limiter
    a, b = engines.add("http://a", "test"), engines.add("http://b", "test")
    assert [await limiter.acquire([each]) for each in (a, b)] == [a, b]
    async with waiting(pool, engines.rank(UNREAD_PROMPT)) as got:
        request_ends(limiter, a)
        assert limiter.in_use(a) == 1
        engines.remove(a)
        request_ends(limiter, b)
        await settle()
        assert got == [b]
    assert (limiter.in_use(a), limiter.in_use(b), limiter.waiting) == (0, 1, 0)


async def test_an_engine_that_is_removed_and_added_again_keeps_its_limit() -> None:
    """The requests that it had are still there."""
    pool = pool_of_decode()
    engines, limiter = pool.engines, pool.limiter
    old = engines.add("http://a", "test")
    assert await limiter.acquire([old]) is old
    for source in ("admin", "file"):
        engines.remove(old)
        again = engines.add("http://a", source)
        assert (limiter.in_use(again), again.open, again.sources) == (1, True, {source})
        assert again.state(0.0)[0] is EngineState.NEW
    async with waiting(pool, engines.rank(UNREAD_PROMPT)) as got:
        assert got == []
        request_ends(limiter, old)
        await settle()
        assert got == [again]
    request_ends(limiter, again)
    engines.remove(again)
    assert engines.add("http://a", "test") is not again, "nothing of it was left"


async def test_a_prompt_cancelled_as_it_gets_a_slot_does_not_start_its_group() -> None:
    """So the other prompts of its request wait no longer than those of other requests."""
    engines, limiter, group = registry(EngineRole.PREFILL), ConcurrencyLimiter(1, 1, 0.05), RequestGroup()
    a = engines.add("http://a", "test")
    assert await limiter.acquire([a]) is a
    prompt = asyncio.create_task(limiter.acquire([a], group=group))
    await settle()
    request_ends(limiter, a)
    assert limiter.in_use(a) == 1  # called ...
    prompt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prompt
    assert (group.granted, limiter.in_use(a)) == (0, 0)
    assert await limiter.acquire([a]) is a
    with anyio.fail_after(5), pytest.raises(NoFreeSlotError):
        await limiter.acquire([a], group=group)
