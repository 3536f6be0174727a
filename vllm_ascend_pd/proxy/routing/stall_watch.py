# SPDX-License-Identifier: Apache-2.0
"""Ends requests at engines that have stopped. A request at an engine that answers and computes may take any time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from vllm_ascend_pd.proxy.routing.answers import FailureKind
from vllm_ascend_pd.proxy.routing.engine_call import EngineCall
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool

_LOOK_SECONDS = 1.0


class StallWatch:
    """Probes the engines of one role while requests wait for their bytes.

    A stopped process keeps its connections open, so only a probe tells it from one that computes.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        probe_timeout: float,
        stall_timeout: float,
        idle_timeout: float | None = None,
        quiet: float = 0.0,
    ) -> None:
        """
        Args:
            pool: the engines.
            probe_timeout: seconds in which an engine must answer a health probe.
            stall_timeout: seconds without a byte, and without a new token in the engine's own metrics, after which a
                request ends.
            idle_timeout: seconds without a byte after which a request ends if the engine served no other request
                meanwhile and its metrics show no work, or are missing. None: no such limit.
            quiet: seconds without a byte before an engine is probed.
        """
        self._pool = pool
        self._probe_timeout = probe_timeout
        self._stall_timeout = stall_timeout
        self._idle_timeout = idle_timeout
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
            await anyio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            silent = self._silent_engines(now)
            self._end_idle(now)
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

    def _end_idle(self, now: float) -> None:
        """Ends calls at engines that serve nothing. One request may wait for the engine's whole queue, so requests
        that the engine serves meanwhile show that it works."""
        limit = self._idle_timeout
        if limit is None:
            return
        for call in self._calls:
            if call.engine and self._idle(call, now) >= limit:
                reason = f"{self._pool.role.value} engine: it served no request for {limit:g} s (--prefill-timeout)"
                call.cut_short(FailureKind.TIMEOUT, reason)

    def _idle(self, call: EngineCall, now: float) -> float:
        engine = self._pool.engines.get(call.engine)
        return now - call.silent_since if engine is None else engine.idle(call.silent_since, now)

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
