# SPDX-License-Identifier: Apache-2.0
"""Asks each engine at an interval whether it is well and what it has to do."""

from __future__ import annotations

import logging
import random
import time

import anyio
import httpx
from anyio.abc import TaskGroup

from .engines import describe
from .load import Snapshot, parse_metrics
from .registry import Engine, Engines
from .streams import TooLarge, read_all

log = logging.getLogger(__name__)

# vLLM's metrics are about 100 KiB per data-parallel rank.
_MAX_METRICS_BYTES = 16 << 20
# How soon an engine that was added is asked.
_LOOK_SECONDS = 0.5


class Checks:
    def __init__(self, roles: tuple[Engines, ...], *, interval: float, timeout: float) -> None:
        """`interval`: seconds from one answer to the next question; `timeout`: seconds for each of two answers."""
        self._roles = roles
        self._interval = interval
        self._timeout = timeout
        self._watched: set[Engine] = set()
        # Engines' connections for requests are not used up by this, and none is held between two checks.
        self._client = httpx.AsyncClient(
            timeout=timeout,
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with self._client, anyio.create_task_group() as tasks:
            while True:
                self._look(tasks)
                await anyio.sleep(min(self._interval, _LOOK_SECONDS))

    def _look(self, tasks: TaskGroup) -> None:
        for engines in self._roles:
            for engine in engines:
                if engine not in self._watched:
                    self._watched.add(engine)
                    tasks.start_soon(self._watch, engines, engine)

    async def _watch(self, engines: Engines, engine: Engine) -> None:
        silent_about_load = False
        try:
            while not engine.removed:
                reason = await self._health(engine.url)
                if engines.checked(engine, reason):
                    _log_change(engine)
                if reason is None:
                    problem = await self._load(engine)
                    if problem is not None and not silent_about_load:
                        log.warning("%s engine %s: its load is unknown: %s", engine.role.value, engine.url, problem)
                    silent_about_load = problem is not None
                # Not all engines, by all proxies, at the same time.
                await anyio.sleep(self._interval * random.uniform(0.9, 1.1))
        finally:
            self._watched.discard(engine)

    async def _health(self, url: str) -> str | None:
        """None, or why the engine does not look healthy."""
        try:
            with anyio.fail_after(self._timeout):
                response = await self._client.get(f"{url}/health")
        except (httpx.HTTPError, TimeoutError) as error:
            return _why(error)
        return None if response.is_success else f"HTTP {response.status_code}"

    async def _load(self, engine: Engine) -> str | None:
        """None, or why the engine's load is unknown."""
        sent = engine.sent
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.stream("GET", f"{engine.url}/metrics") as response:
                    if not response.is_success:
                        return f"HTTP {response.status_code} for /metrics"
                    body = await read_all(response.aiter_raw(), _MAX_METRICS_BYTES)
            snapshot = parse_metrics(body.decode(errors="replace"))
        except (httpx.HTTPError, TimeoutError) as error:
            return _why(error)
        except TooLarge:
            return f"/metrics exceeds {_MAX_METRICS_BYTES} bytes"
        except ValueError as error:
            return f"/metrics cannot be read: {type(error).__name__}"
        if snapshot == Snapshot():
            return "/metrics does not say: is it vLLM's?"
        engine.note(snapshot, sent, time.monotonic())
        return None


def _why(error: Exception) -> str:
    return describe(error) if isinstance(error, httpx.HTTPError) else "no answer in time"


def _log_change(engine: Engine) -> None:
    if engine.gate.ejected:
        log.warning(
            "%s engine %s is ejected: %s: it gets requests only if no other is left, until its health checks succeed",
            engine.role.value,
            engine.url,
            engine.gate.reason,
        )
    else:
        log.info("%s engine %s is healthy again: it gets requests", engine.role.value, engine.url)
