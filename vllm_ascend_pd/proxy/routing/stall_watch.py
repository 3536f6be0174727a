# SPDX-License-Identifier: Apache-2.0
"""Ends requests at engines that have stopped. An engine that answers and computes is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from vllm_ascend_pd.proxy.routing.engine_call import EngineCall
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind

_LOOK_SECONDS = 1.0


class StallWatch:
    """Looks after the engines of one role while requests wait for their bytes. A stopped process keeps its connections
    open, so only a probe tells it from one that computes."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        probe_timeout: float,
        stall_timeout: float,
        idle_timeout: float | None = None,
        quiet: float = 0.0,
    ) -> None:
        """Seconds: `quiet` without a byte until an engine is probed; `probe_timeout` for its answer to a health probe;
        `stall_timeout` without a byte, and without a token in the engine's own metrics; `idle_timeout` without a byte,
        where the engine serves no other request either, and its metrics show no work or say nothing (None: for ever).
        """
        self._pool = pool
        self._probe_timeout = probe_timeout
        self._stall_timeout = stall_timeout
        self._idle_timeout = idle_timeout
        self._quiet = quiet
        self._runs: dict[EngineCall, int] = {}
        """With how many engines each had asked at the last look."""

    def __contains__(self, run: EngineCall) -> bool:
        return run in self._runs

    @contextmanager
    def over(self, run: EngineCall) -> Iterator[None]:
        self._runs[run] = 0
        try:
            yield
        finally:
            del self._runs[run]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            silent = self._silent_engines(now)
            self._end_idle(now)
            async with anyio.create_task_group() as tasks:
                for url in silent:
                    tasks.start_soon(self._look_at, url)

    def _silent_engines(self, now: float) -> set[str]:
        urls = set()
        for run, asked in self._runs.items():
            if len(run.engines) != asked:  # it waited for a place, or for a connection
                self._runs[run] = len(run.engines)
                run.heard()
            if run.engine and now - run.silent_since >= self._quiet:
                urls.add(run.engine)
        return urls

    def _end_idle(self, now: float) -> None:
        """The answer to one of many prompts takes as long as the engine's queue: the others show that it works."""
        limit = self._idle_timeout
        if limit is not None:
            for run in self._runs:
                if run.engine and self._pool.idle(run.engine, run.silent_since, now) >= limit:
                    reason = f"{self._pool.role.value} engine: it served nothing for {limit:g} s (--prefill-timeout)"
                    run.cut_short(FailureKind.TIMEOUT, reason)

    async def _look_at(self, url: str) -> None:
        asked = {run: run.silent_since for run in self._runs if run.engine == url}
        name = self._pool.role.value
        if await self._pool.is_silent(url, self._probe_timeout):
            reason = f"{name} engine: no answer to a health probe for {self._probe_timeout:g} s"
            stopped = [run for run, since in asked.items() if time.monotonic() - since >= self._quiet]
        else:
            reason = f"{name} engine: it computed nothing for {self._stall_timeout:g} s, by its own metrics"
            stopped = [
                run
                for run, since in asked.items()
                if run.may_stall and self._pool.computed_nothing(url, since) >= self._stall_timeout
            ]
        for run in stopped:
            if run in self._runs and run.engine == url and run.silent_since == asked[run]:
                run.cut_short(FailureKind.TIMEOUT, reason)
