# SPDX-License-Identifier: Apache-2.0
"""Keeps the engine registries in step with the operator's lists and with the DNS names in them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import anyio

from vllm_ascend_pd.proxy.routing.addresses import DNS_SCHEME
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, EngineRole, TooManyEnginesError

log = logging.getLogger(__name__)

_LOOKUP_SECONDS = 10.0
"""Resolvers ask each of up to three servers twice, for 5 s each time; that would take longer than useful."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Resolves a `dns+http` URL, as `resolve_url` does."""


class Discovery:
    """Adds and removes engines as lists and DNS answers change. An engine stays as long as any of them has it."""

    def __init__(
        self, roles: Mapping[EngineRole, EngineRegistry], interval: float, resolve: Resolve | None = None
    ) -> None:
        """`interval`: seconds between two lookups of all names."""
        self._resolve = resolve or resolve_url
        self._roles = roles
        self._interval = interval
        self._names: dict[str, dict[EngineRole, tuple[str, ...]]] = {}
        """DNS names by list and role."""
        self._listed: anyio.Event | None = None
        """Set when a list has changed; `run` creates it."""
        self.problems: dict[str, str] = {}
        """Why some engines of a list or name are missing, by list or name."""

    def listed(self, source: str, urls: Mapping[EngineRole, Sequence[str]]) -> None:
        """Takes the current list of `source`. URLs are as `check_engine_url` returns them. `run` looks names up."""
        before = self._wanted()
        self._names[source] = {role: tuple(url for url in urls.get(role, ()) if _is_name(url)) for role in self._roles}
        self._use(source, {role: [url for url in urls.get(role, ()) if not _is_name(url)] for role in self._roles})
        for role, name in before - self._wanted():
            self._use(name, {role: []})
        if self._listed is not None:
            self._listed.set()

    async def run(self) -> None:
        """Looks all names up at each interval, and when a list changes, until cancelled."""
        while True:
            listed = self._listed = anyio.Event()
            with anyio.move_on_after(self._interval):
                await listed.wait()
            await self.look()

    async def look(self) -> None:
        """Looks all names up once. The engines of a name that does not resolve stay."""
        async with anyio.create_task_group() as tasks:
            for name in {name for _, name in self._wanted()}:
                tasks.start_soon(self._look_up, name)

    async def _look_up(self, name: str) -> None:
        try:
            with anyio.fail_after(_LOOKUP_SECONDS):
                urls = await self._resolve(name)
        except (OSError, UnicodeError, TimeoutError) as error:
            self._problem(name, f"the name does not resolve: {str(error) or 'no answer in time'}")
            return
        self._use(name, {role: urls for role, wanted in self._wanted() if wanted == name})

    def _wanted(self) -> set[tuple[EngineRole, str]]:
        return {(role, name) for names in self._names.values() for role, each in names.items() for name in each}

    def _use(self, source: str, urls: Mapping[EngineRole, Sequence[str]]) -> None:
        """Makes `urls` the engines of `source`, which is a list or a name."""
        problem = None
        for role, each in urls.items():
            try:
                added, removed = self._roles[role].replace(source, each)
            except TooManyEnginesError as full:
                problem = str(full)
                continue
            for url in added:
                log.info("%s engine %s: added by %s", role.value, url, source)
            for url in removed:
                log.info("%s engine %s: removed because %s no longer lists it", role.value, url, source)
        self._problem(source, problem)

    def _problem(self, source: str, problem: str | None) -> None:
        """Records why engines of `source` are missing, and logs a new reason. None: none is missing."""
        if problem is None:
            self.problems.pop(source, None)
        elif self.problems.get(source) != problem:
            self.problems[source] = problem
            log.error("engines listed by %s: %s: some are missing", source, problem)


async def resolve_url(name: str) -> list[str]:
    """Resolves `dns+http://NAME:PORT` to one URL per address. Raises OSError, or UnicodeError for an invalid name."""
    parts = urlsplit(name)
    found = await anyio.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    # An address with a scope (%) works on one link only.
    hosts = sorted(host for host in {str(address[0]) for _, _, _, _, address in found} if "%" not in host)
    return [f"http://[{host}]:{parts.port}" if ":" in host else f"http://{host}:{parts.port}" for host in hosts]


def _is_name(url: str) -> bool:
    return url.startswith(f"{DNS_SCHEME}:")
