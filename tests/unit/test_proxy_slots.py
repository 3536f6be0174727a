# SPDX-License-Identifier: Apache-2.0
"""Slots at engines that are added and removed while requests wait."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
from registry_listener import registry

from vllm_ascend_pd.proxy.routing.answers import EngineRole, FailureKind
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter, NoFreeSlotError, RequestGroup
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool
from vllm_ascend_pd.proxy.routing.strategies import NO_PROMPT

FOREVER = 60.0


def pool_of(role: EngineRole, timeout: float = FOREVER, eject_after: int = 3) -> EnginePool:
    """Each engine has one slot."""
    return EnginePool(
        role,
        ConcurrencyLimiter(1, 3, timeout),
        strategy="least-load",
        max_connections=1,
        connect_timeout=1,
        read_timeout=1,
        fresh_for=1,
        eject_after=eject_after,
    )


async def settle() -> None:
    for _ in range(10):
        await anyio.sleep(0)


@pytest.mark.parametrize("started", [False, True], ids=["first", "after another prompt"])
def test_a_waiting_request_uses_the_engine_that_replaces_all_others(started: bool) -> None:
    """A list that is read again has one engine in place of another. For a moment there is no engine."""

    async def run() -> None:
        pool = pool_of(EngineRole.PREFILL)
        engines = pool.engines
        engines.replace("file", ["http://old"])
        engines.require_checks()
        group = RequestGroup()
        first = await pool.acquire(pool.engines.rank(NO_PROMPT, group=group if started else RequestGroup()), set())
        assert first is engines.get("http://old")
        got: list[RegisteredEngine | None] = []

        async def wait() -> None:
            got.append(await pool.acquire(pool.engines.rank(NO_PROMPT, group=group), set()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await settle()
            engines.replace("file", ["http://new"])
            await settle()
            assert got == [engines.get("http://new")]

    anyio.run(run)


@pytest.mark.parametrize("at_once", [False, True])
def test_replaced_engines_do_not_restart_the_queue_timeout(at_once: bool) -> None:
    """`at_once`: for a moment there is no engine."""

    async def run() -> None:
        pool = pool_of(EngineRole.DECODE, timeout=0.3)
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
                await pool.acquire(pool.engines.rank(NO_PROMPT), set())
            assert raised.value.kind is FailureKind.FULL
            assert time.monotonic() - begun < 1
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_a_healthy_engine_is_chosen_among_those_that_replace_others() -> None:
    async def run() -> None:
        pool = pool_of(EngineRole.DECODE, eject_after=1)
        engines = pool.engines
        old = engines.add("http://old", "test")
        assert await pool.limiter.acquire([old]) is old
        got: list[RegisteredEngine | None] = []

        async def wait() -> None:
            got.append(await pool.acquire(pool.engines.rank(NO_PROMPT), set()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await settle()
            engines.checked(engines.add("http://ejected", "test"), "HTTP 500")
            healthy = engines.add("http://healthy", "test")
            engines.remove(old)
            await settle()
            assert got == [healthy]

    anyio.run(run)


def test_an_engine_that_failed_is_the_last_resort_when_others_are_removed() -> None:
    async def run() -> None:
        pool = pool_of(EngineRole.DECODE)
        engines = pool.engines
        failed, old = engines.add("http://failed", "test"), engines.add("http://old", "test")
        assert await pool.limiter.acquire([old]) is old
        got: list[RegisteredEngine | None] = []

        async def wait() -> None:
            choice = pool.engines.rank(NO_PROMPT, {failed.url}).then([failed.url])
            got.append(await pool.acquire(choice, set()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await settle()
            engines.remove(old)
            await settle()
            assert got == [failed]

    anyio.run(run)


def test_a_prompt_cancelled_as_it_gets_a_slot_does_not_start_its_group() -> None:
    """So the other prompts of its request wait no longer than those of other requests."""

    async def run() -> None:
        engines, limiter, group = registry(EngineRole.PREFILL), ConcurrencyLimiter(1, 1, 0.05), RequestGroup()
        a = engines.add("http://a", "test")
        assert await limiter.acquire([a]) is a
        prompt = asyncio.create_task(limiter.acquire([a], group=group))
        await settle()
        with limiter.releasing(a):
            pass
        assert limiter.in_use(a) == 1  # called ...
        prompt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prompt
        assert (group.started, limiter.in_use(a)) == (False, 0)
        assert await limiter.acquire([a]) is a
        with anyio.fail_after(5), pytest.raises(NoFreeSlotError):
            await limiter.acquire([a], group=group)

    anyio.run(run)
