# SPDX-License-Identifier: Apache-2.0
"""Asks engines how they are: health and load of all at an interval, and whether one that sends nothing has stopped."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import anyio
from anyio.abc import TaskGroup

from vllm_ascend_pd.proxy.http.engine_client import ConnectionLost, EngineClient, HttpError
from vllm_ascend_pd.proxy.http.messages import TooLarge, read_all
from vllm_ascend_pd.proxy.routing.answers import FailureKind
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine
from vllm_ascend_pd.proxy.routing.engine_pool import EngineCall, EnginePool
from vllm_ascend_pd.proxy.routing.load import LoadSnapshot, parse_metrics
from vllm_ascend_pd.proxy.routing.registry import MAX_ENGINES, EngineRegistry

log = logging.getLogger(__name__)

_MAX_METRICS_BYTES = 16 << 20
"""vLLM's metrics are about 100 KiB per data-parallel rank."""
_NEW_ENGINE_SECONDS = 0.5
"""Limit of the time until a new engine is asked."""
_FIRST_LOOK_SECONDS = 0.01
"""Between two looks whether all engines have been checked, when the proxy starts."""
_STALL_LOOK_SECONDS = 1.0


class HealthChecks:
    """Runs one loop per engine, for as long as the engine is registered."""

    def __init__(self, roles: tuple[EngineRegistry, ...], *, interval: float, timeout: float) -> None:
        """`interval`: seconds between two checks of an engine. `timeout`: seconds for each of its two answers."""
        self._roles = roles
        self._interval = interval
        self._timeout = timeout
        self._watched: set[RegisteredEngine] = set()
        """Engines that have a loop."""
        # A client of its own, so that checks take no connections from requests. It keeps none open between checks.
        self._client = EngineClient(
            max_connections=len(roles) * MAX_ENGINES,
            connect_timeout=timeout,
            read_timeout=timeout,
            reuse_connections=False,
        )

    async def run(self) -> None:
        """Checks all engines until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    self._look(tasks)
                    await anyio.sleep(min(self._interval, _NEW_ENGINE_SECONDS))
        finally:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()

    async def first_results(self) -> None:
        """Waits until `run` has checked each engine once, but no longer than for one answer."""
        with anyio.move_on_after(self._timeout):
            while not all(engine.gate.checked_once for engines in self._roles for engine in engines):
                await anyio.sleep(_FIRST_LOOK_SECONDS)

    def _look(self, tasks: TaskGroup) -> None:
        for engines in self._roles:
            for engine in engines:
                if engine not in self._watched:
                    self._watched.add(engine)
                    tasks.start_soon(self._watch, engines, engine)

    async def _watch(self, engines: EngineRegistry, engine: RegisteredEngine) -> None:
        silent_about_load = False
        try:
            while not engine.removed:
                reason = await self._health(engine.url)
                if reason is None:
                    problem = await self._load(engine)
                    if problem is not None and not silent_about_load:
                        log.warning("%s engine %s: its load is unknown: %s", engine.role.value, engine.url, problem)
                    silent_about_load = problem is not None
                broken = engine.broken if reason is None else None
                if engines.checked(engine, reason or broken, at_once=broken is not None):
                    _log_change(engine)
                # At random, so that not all proxies check all engines at the same time.
                await anyio.sleep(self._interval * random.uniform(0.9, 1.1))
        finally:
            self._watched.discard(engine)

    async def _health(self, url: str) -> str | None:
        """Returns None, or why the engine does not look healthy."""
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.get(f"{url}/health") as answer:
                    if answer.is_success:
                        return None
                    reason = f"HTTP {answer.status}"
                    wants_tls = answer.status == HTTPStatus.BAD_REQUEST
        except (HttpError, TimeoutError) as error:
            reason, wants_tls = _why(error), isinstance(error, ConnectionLost)
        # Servers behind TLS answer plain HTTP like this.
        return f"{reason}: does it want https://?" if wants_tls and url.startswith("http://") else reason

    async def _load(self, engine: RegisteredEngine) -> str | None:
        """Reads and notes the engine's load. Returns None, or why it is unknown."""
        sent = engine.sent
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.get(f"{engine.url}/metrics") as answer:
                    if not answer.is_success:
                        return f"HTTP {answer.status} for /metrics"
                    body = await read_all(answer.chunks(), _MAX_METRICS_BYTES)
            snapshot = parse_metrics(body.decode(errors="replace"))
        except (HttpError, TimeoutError) as error:
            return _why(error)
        except TooLarge:
            return f"/metrics exceeds {_MAX_METRICS_BYTES} bytes"
        except ValueError as error:
            return f"/metrics cannot be read: {type(error).__name__}"
        if snapshot == LoadSnapshot():
            return "/metrics has no figures of load: is it vLLM's?"
        engine.note(snapshot, sent, time.monotonic())
        return None


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, HttpError) else "no answer in time"


def _log_change(engine: RegisteredEngine) -> None:
    if engine.gate.ejected:
        _, reason = engine.gate.state(time.monotonic())
        log.warning(
            "%s engine %s is ejected: %s: it gets requests only if no other engine is left, until its checks are good",
            engine.role.value,
            engine.url,
            reason,
        )
    else:
        log.info("%s engine %s is healthy again", engine.role.value, engine.url)


class StallWatch:
    """Probes the engines of one role while requests wait for their bytes, and ends the requests at those that stopped.

    A request at an engine that answers and computes may take any time. A stopped process keeps its connections open, so
    only a probe tells it from one that computes.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        probe_timeout: float,
        stall_timeout: float,
        quiet: float = 0.0,
    ) -> None:
        """
        Args:
            pool: the engines.
            probe_timeout: seconds in which an engine must answer a health probe.
            stall_timeout: seconds without a byte, and without a new token in the engine's own metrics, after which a
                request ends.
            quiet: seconds without a byte before an engine is probed.
        """
        self._pool = pool
        self._probe_timeout = probe_timeout
        self._stall_timeout = stall_timeout
        self._quiet = quiet
        self._calls: dict[EngineCall, int] = {}
        """Calls being watched, each with the number of engines it had asked at the last look."""

    def __contains__(self, call: EngineCall) -> bool:
        return call in self._calls

    @contextmanager
    def over(self, call: EngineCall) -> Iterator[None]:
        """Watches a call for the time of the `with` block."""
        self._calls[call] = 0
        try:
            yield
        finally:
            del self._calls[call]

    async def run(self) -> None:
        """Looks at all calls once a second, until cancelled."""
        while True:
            await anyio.sleep(_STALL_LOOK_SECONDS)
            now = time.monotonic()
            silent = self._silent_engines(now)
            async with anyio.create_task_group() as tasks:
                for url in silent:
                    tasks.start_soon(self._look_at, url)

    def _silent_engines(self, now: float) -> set[str]:
        """URLs of the engines to probe."""
        urls = set()
        for call, asked in self._calls.items():
            if len(call.engines) != asked:  # until now it waited for a slot, or for a connection
                self._calls[call] = len(call.engines)
                call.heard()
            if call.engine and now - call.silent_since >= self._quiet:
                urls.add(call.engine)
        return urls

    def _computed_nothing(self, url: str, since: float) -> float:
        engine = self._pool.engines.get(url)
        return 0.0 if engine is None else engine.computed_nothing(since)

    async def _look_at(self, url: str) -> None:
        """Probes an engine, and ends its calls if it has stopped."""
        asked = {call: call.silent_since for call in self._calls if call.engine == url}
        name = self._pool.role.value
        if await self._pool.is_silent(url, self._probe_timeout):
            reason = f"{name} engine: no answer to a health probe within {self._probe_timeout:g} s"
            stopped = [call for call, since in asked.items() if time.monotonic() - since >= self._quiet]
        else:
            reason = f"{name} engine: its metrics show no new token for {self._stall_timeout:g} s"
            stopped = [
                call
                for call, since in asked.items()
                if call.may_stall and self._computed_nothing(url, since) >= self._stall_timeout
            ]
        for call in stopped:
            if call in self._calls and call.engine == url and call.silent_since == asked[call]:
                call.cut_short(FailureKind.TIMEOUT, reason)
