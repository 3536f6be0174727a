# SPDX-License-Identifier: Apache-2.0
"""The proxy's work beside its requests: lists of engines, health checks, and watching silent engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from vllm_ascend_pd.proxy.routing.checks import HealthChecks, StallWatch
from vllm_ascend_pd.proxy.routing.discovery import Discovery
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.settings import ProxySettings


class Background:
    """The event loop's thread owns it."""

    def __init__(self, settings: ProxySettings, prefill: EnginePool, decode: EnginePool) -> None:
        self.prefill_watch = StallWatch(
            prefill,
            probe_timeout=settings.probe_timeout,
            stall_timeout=settings.read_timeout,
        )
        self.decode_watch = StallWatch(
            decode,
            probe_timeout=settings.probe_timeout,
            stall_timeout=settings.read_timeout,
            quiet=settings.probe_timeout,
        )
        self.ended = asyncio.Event()
        """Set when the work has ended: the server stops, or a task failed."""
        self._pools = (prefill, decode)
        self._checks = HealthChecks(
            (prefill.engines, decode.engines), interval=settings.check_interval, timeout=settings.health_timeout
        )
        self._discovery = Discovery(
            {pool.role: pool.engines for pool in self._pools},
            dict(zip((prefill.role, decode.role), settings.engines(), strict=True)),
            settings.dns_interval,
        )

    def problems(self) -> list[str]:
        """Problems with the lists of engines, one line each."""
        return [f"{source}: {problem}" for source, problem in self._discovery.problems.items()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does the work during the `with` block, and cancels it at the end. A task that fails cancels the block."""
        try:
            await self._discovery.look()
            for pool in self._pools:
                pool.engines.require_checks()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._discovery.run)
                tasks.start_soon(self.prefill_watch.run)
                tasks.start_soon(self.decode_watch.run)
                tasks.start_soon(self._checks.run)
                await self._checks.first_results()  # so `/health` is right from the first request on
                yield
                tasks.cancel_scope.cancel()
        finally:
            self.ended.set()
