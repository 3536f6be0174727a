# SPDX-License-Identifier: Apache-2.0
"""Whether a request could be served now."""

from __future__ import annotations

import time
from http import HTTPStatus

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .engines import EnginePool

# However often the proxy is asked, engines are not probed more often than this.
_FRESH_SECONDS = 1.0


class Health:
    def __init__(self, pools: tuple[EnginePool, ...], timeout: float) -> None:
        self._pools = pools
        self._timeout = timeout
        self._lock = anyio.Lock()
        self._states: dict[str, dict[str, str]] = {}
        self._probed_at = float("-inf")

    async def get(self, _: Request) -> Response:
        """200 when every role has a healthy engine, else 503; lists each engine's state."""
        async with self._lock:
            if time.monotonic() - self._probed_at > _FRESH_SECONDS:
                await self._probe_all()
        usable = all("ok" in states.values() for states in self._states.values())
        return JSONResponse(
            {"status": "ok" if usable else "unavailable", **self._states},
            status_code=HTTPStatus.OK if usable else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def _probe_all(self) -> None:
        states: dict[str, dict[str, str]] = {pool.role.value: dict.fromkeys(pool.urls, "") for pool in self._pools}

        async def probe(pool: EnginePool, url: str) -> None:
            states[pool.role.value][url] = await pool.probe(url, self._timeout)

        async with anyio.create_task_group() as tasks:
            for pool in self._pools:
                for url in pool.urls:
                    tasks.start_soon(probe, pool, url)
        self._states, self._probed_at = states, time.monotonic()
