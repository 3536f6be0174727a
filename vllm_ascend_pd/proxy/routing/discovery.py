# SPDX-License-Identifier: Apache-2.0
"""Makes engines of what the operator lists, and of all addresses of the DNS names in there, which change."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import anyio

from vllm_ascend_pd.proxy.routing.addresses import DNS_SCHEME
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, EngineRole, TooManyEnginesError

log = logging.getLogger(__name__)

# Resolvers ask each of three servers twice, for 5 s.
_LOOKUP_SECONDS = 10.0

Resolve = Callable[[str], Awaitable[list[str]]]


class Discovery:
    def __init__(
        self, roles: Mapping[EngineRole, EngineRegistry], interval: float, resolve: Resolve | None = None
    ) -> None:
        """`interval`: seconds from one lookup of all names to the next."""
        self._resolve = resolve or resolve_url
        self._roles = roles
        self._interval = interval
        self._names: dict[str, dict[EngineRole, tuple[str, ...]]] = {}
        self._listed: anyio.Event | None = None
        self.problems: dict[str, str] = {}
        """By source or name: why not all of its engines are known."""

    def listed(self, source: str, urls: Mapping[EngineRole, Sequence[str]]) -> None:
        """What `source` lists now, as `check_engine_url` returns it. Names are looked up soon."""
        before = self._wanted()
        self._names[source] = {role: tuple(url for url in urls.get(role, ()) if _is_name(url)) for role in self._roles}
        self._use(source, {role: [url for url in urls.get(role, ()) if not _is_name(url)] for role in self._roles})
        for role, name in before - self._wanted():
            self._use(name, {role: []})
        if self._listed is not None:
            self._listed.set()

    async def run(self) -> None:
        """Until cancelled, looks names up again."""
        while True:
            listed = self._listed = anyio.Event()
            with anyio.move_on_after(self._interval):
                await listed.wait()
            await self.look()

    async def look(self) -> None:
        """Looks all names up. The engines of one that does not resolve stay."""
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
        """These are the engines of `source` now."""
        problem = None
        for role, each in urls.items():
            try:
                came, gone = self._roles[role].replace(source, each)
            except TooManyEnginesError as full:
                problem = str(full)
                continue
            for url in came:
                log.info("%s engine %s: added, listed by %s", role.value, url, source)
            for url in gone:
                log.info("%s engine %s: removed, %s does not list it any more", role.value, url, source)
        self._problem(source, problem)

    def _problem(self, source: str, problem: str | None) -> None:
        """Logs it once."""
        if problem is None:
            self.problems.pop(source, None)
        elif self.problems.get(source) != problem:
            self.problems[source] = problem
            log.error("engines listed by %s: %s: not all are as listed", source, problem)


async def resolve_url(name: str) -> list[str]:
    """`dns+http://NAME:PORT` as the URLs of all its addresses. Raises OSError, or UnicodeError for what is no name."""
    parts = urlsplit(name)
    found = await anyio.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    # An address with a scope is of use on one link alone.
    hosts = sorted(host for host in {str(address[0]) for _, _, _, _, address in found} if "%" not in host)
    return [f"http://[{host}]:{parts.port}" if ":" in host else f"http://{host}:{parts.port}" for host in hosts]


def _is_name(url: str) -> bool:
    return url.startswith(f"{DNS_SCHEME}:")
