# SPDX-License-Identifier: Apache-2.0
"""`GET /health`: whether the proxy could serve a request now."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_ascend_pd.proxy.operate.failure_stats import FailureStats
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, RegisteredEngine

_FRESH_SECONDS = 1.0
"""For so long, answers reuse the last probe's results."""


class Health:
    def __init__(
        self,
        pools: tuple[EnginePool, ...],
        failure_stats: FailureStats,
        problems: Callable[[], list[str]],
        timeout: float,
    ) -> None:
        self._pools = pools
        self._failure_stats = failure_stats
        self._problems = problems
        self._timeout = timeout
        self._lock = anyio.Lock()
        self._states: dict[str, dict[str, str]] = {}
        self._probed_at = float("-inf")

    async def get(self, _: Request) -> Response:
        """200 if each role has a healthy engine that may get requests, else 503. The body has each engine's state, the
        reasons why engines get no requests, problems with lists of engines, and counts of failures and retries."""
        states = await self.states()
        usable = all(any(states[pool.role.value].get(url) == "ok" for url in pool.urls) for pool in self._pools)
        withheld = {pool.role.value: _withheld(pool.engines) for pool in self._pools}
        return JSONResponse(
            {
                "status": "ok" if usable else "unavailable",
                **states,
                "withheld": withheld,
                "problems": self._problems(),
                **self._failure_stats.shown(),
            },
            status_code=HTTPStatus.OK if usable else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def states(self) -> dict[str, dict[str, str]]:
        """By role and URL: "ok", or the engine's problem."""
        async with self._lock:
            if time.monotonic() - self._probed_at > _FRESH_SECONDS:
                await self._probe_all()
            return self._states

    async def _probe_all(self) -> None:
        states: dict[str, dict[str, str]] = {pool.role.value: {} for pool in self._pools}

        async def probe(pool: EnginePool, engine: RegisteredEngine) -> None:
            state = await pool.probe(engine.url, self._timeout)
            states[pool.role.value][engine.url] = engine.broken or state if state == "ok" else state

        async with anyio.create_task_group() as tasks:
            for pool in self._pools:
                for engine in pool.engines:
                    states[pool.role.value][engine.url] = ""  # in the engines' order
                    tasks.start_soon(probe, pool, engine)
        self._states, self._probed_at = states, time.monotonic()


def _withheld(engines: EngineRegistry) -> dict[str, str]:
    """Returns by URL why an engine gets no requests, or gets them only if no other is left."""
    reasons = {engine.url: "new: no health check was good yet" for engine in engines if not engine.gate.proven}
    reasons |= {engine.url: f"ejected: {engine.gate.reason}" for engine in engines if engine.gate.ejected}
    return reasons | {engine.url: "draining" for engine in engines if engine.draining}
