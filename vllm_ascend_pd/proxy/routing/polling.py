# SPDX-License-Identifier: Apache-2.0
"""What the proxy asks at an interval: DNS for the addresses of engines, and all engines for their health and load."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskGroup

from vllm_ascend_pd.proxy.http.engine_client import ConnectionLost, EngineClient, HttpError
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.engines import EngineRegistry, RegisteredEngine, TooManyEnginesError
from vllm_ascend_pd.proxy.routing.load import LoadSnapshot, MetricsReader
from vllm_ascend_pd.proxy.settings import DNS_SCHEME, ProxySettings
from vllm_ascend_pd.transport.names import HostNames

log = logging.getLogger(__name__)

COMMAND_LINE = "the command line"
_LOOKUP_SECONDS = 10.0
"""After this time a name does not resolve. Its lookup goes on: resolvers ask up to 3 servers twice, for 5 s each."""
_NEW_ENGINE_SECONDS = 0.5
"""Limit of the time until a new engine is asked."""
_FIRST_LOOK_SECONDS = 0.01
"""Between two looks whether all names and engines have been asked, when the proxy starts."""
_FIRST_ADDRESSES_SECONDS = 2.0
"""When the proxy starts, it waits so long for the addresses of names."""


class Discovery:
    """Adds the engines of the command line, and adds and removes those of its DNS names as answers change.

    An engine stays as long as the command line or any name has it.
    """

    def __init__(
        self, roles: Mapping[EngineRole, EngineRegistry], settings: ProxySettings, host_names: HostNames
    ) -> None:
        self._host_names = host_names
        listed = dict(zip(EngineRole, settings.engines(), strict=True))
        self._roles = roles
        self._interval = settings.dns_interval
        self._names = {(role, url) for role, urls in listed.items() for url in urls if _is_name(url)}
        self._pending = {url for _, url in self._names}
        """Names that have not been looked up yet."""
        self.problems: dict[str, str] = {}
        """Why some engines of the command line or of a name are missing, by `COMMAND_LINE` or name."""
        self._use(COMMAND_LINE, {role: [url for url in urls if not _is_name(url)] for role, urls in listed.items()})

    async def run(self) -> None:
        """Looks all names up, again at each interval, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for name in self._pending:
                tasks.start_soon(self._follow, name)

    async def first_results(self) -> None:
        """Waits until `run` has looked each name up once, but not for name servers that do not answer."""
        with anyio.move_on_after(_FIRST_ADDRESSES_SECONDS):
            while self._pending:
                await anyio.sleep(_FIRST_LOOK_SECONDS)

    async def _follow(self, name: str) -> None:
        while True:
            await self.look_up(name)
            self._pending.discard(name)
            await anyio.sleep(self._interval)

    async def look_up(self, name: str) -> None:
        """Looks a name up once. If it does not resolve, its engines stay."""
        parts = urlsplit(name)
        assert parts.hostname is not None
        try:
            with anyio.fail_after(_LOOKUP_SECONDS):
                addresses = await self._host_names.look_up(parts.hostname)
        except (OSError, UnicodeError, TimeoutError) as error:
            self._problem(name, f"the name does not resolve: {str(error) or 'no answer in time'}")
            return
        # An address with a scope (%) works on one link only.
        hosts = sorted(f"[{each}]" if ":" in each else each for each in addresses if "%" not in each)
        urls = [f"http://{host}:{parts.port}" for host in hosts]
        self._use(name, {role: urls for role, each in self._names if each == name})

    def _use(self, source: str, urls: Mapping[EngineRole, Sequence[str]]) -> None:
        """Makes `urls` the engines of `source`, which is the command line or a name."""
        problem = None
        for role, each in urls.items():
            try:
                self._roles[role].replace(source, each)
            except TooManyEnginesError as full:
                problem = str(full)
        self._problem(source, problem)

    def _problem(self, source: str, problem: str | None) -> None:
        """Records why engines of `source` are missing, and logs a new reason. None: none is missing."""
        if problem is None:
            self.problems.pop(source, None)
        elif self.problems.get(source) != problem:
            self.problems[source] = problem
            log.error("engines listed by %s: %s: some are missing", source, problem)


def _is_name(url: str) -> bool:
    return url.startswith(f"{DNS_SCHEME}:")


class HealthChecks:
    """Runs one loop per engine, for as long as the engine is registered."""

    def __init__(self, roles: Collection[EngineRegistry], settings: ProxySettings, host_names: HostNames) -> None:
        self._roles = roles
        self._interval = settings.check_interval
        self._timeout = settings.health_timeout
        """For each of an engine's two answers."""
        self._watched: set[RegisteredEngine] = set()
        """Engines that have a loop."""
        # A client of its own, so that checks take no connections from requests. It keeps none open between checks.
        self._client = EngineClient(
            host_names,
            connect_timeout=self._timeout,
            read_timeout=self._timeout,
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
            while not engine.removed or engine.slots_used:  # `StallWatch` asks whether it computes what it still has
                reason, answers = await self._health(engine.url)
                if answers:
                    problem = await self._load(engine)
                    if problem is not None and not silent_about_load:
                        log.warning("%s engine %s: its load is unknown: %s", engine.role.value, engine.url, problem)
                    silent_about_load = problem is not None
                broken = engine.broken if reason is None else None
                changed = engines.checked(engine, reason or broken, at_once=broken is not None)
                if changed and not engine.removed:
                    _log_change(engine)
                # At random, so that not all proxies check all engines at the same time.
                await anyio.sleep(self._interval * random.uniform(0.9, 1.1))
        finally:
            self._watched.discard(engine)

    async def _health(self, url: str) -> tuple[str | None, bool]:
        """Returns None, or why the engine does not look healthy; and whether it answers at all."""
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.get(f"{url}/health") as answer:
                    if answer.is_success:
                        return None, True
                    reason, answers = f"HTTP {answer.status}", True
                    wants_tls = answer.status == HTTPStatus.BAD_REQUEST
        except (HttpError, TimeoutError) as error:
            reason, answers, wants_tls = _why(error), False, isinstance(error, ConnectionLost)
        # Servers behind TLS answer plain HTTP like this.
        return f"{reason}: does it want https://?" if wants_tls and url.startswith("http://") else reason, answers

    async def _load(self, engine: RegisteredEngine) -> str | None:
        """Reads and notes the engine's load. Returns None, or why it is unknown."""
        sent, metrics = engine.sent, MetricsReader()
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.get(f"{engine.url}/metrics") as answer:
                    if not answer.is_success:
                        return f"HTTP {answer.status} for /metrics"
                    while piece := await answer.read():
                        metrics.feed(piece)
            snapshot = metrics.end()
        except (HttpError, TimeoutError) as error:
            return _why(error)
        except ValueError as error:
            return f"/metrics cannot be read: {error}"
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
