# SPDX-License-Identifier: Apache-2.0
"""Where engines come from: the operator's URLs, and the DNS names among them, which are looked up at an interval."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import anyio

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, TooManyEnginesError
from vllm_ascend_pd.proxy.settings import DNS_SCHEME, ProxySettings

log = logging.getLogger(__name__)

COMMAND_LINE = "the command line"
_LOOKUP_SECONDS = 10.0
"""Resolvers ask each of up to three servers twice, for 5 s each time; that would take longer than useful."""


class Discovery:
    """Adds the engines of the command line, and adds and removes those of its DNS names as answers change.

    An engine stays as long as the command line or any name has it.
    """

    def __init__(self, roles: Mapping[EngineRole, EngineRegistry], settings: ProxySettings) -> None:
        listed = dict(zip(EngineRole, settings.engines(), strict=True))
        self._roles = roles
        self._interval = settings.dns_interval
        self._names = {(role, url) for role, urls in listed.items() for url in urls if _is_name(url)}
        self.problems: dict[str, str] = {}
        """Why some engines of the command line or of a name are missing, by `COMMAND_LINE` or name."""
        self._use(COMMAND_LINE, {role: [url for url in urls if not _is_name(url)] for role, urls in listed.items()})

    async def run(self) -> None:
        """Looks all names up at each interval, until cancelled."""
        while True:
            await anyio.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """Looks all names up once. The engines of a name that does not resolve stay."""
        async with anyio.create_task_group() as tasks:
            for name in {name for _, name in self._names}:
                tasks.start_soon(self._look_up, name)

    async def _look_up(self, name: str) -> None:
        try:
            with anyio.fail_after(_LOOKUP_SECONDS):
                urls = await resolve_url(name)
        except (OSError, UnicodeError, TimeoutError) as error:
            self._problem(name, f"the name does not resolve: {str(error) or 'no answer in time'}")
            return
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


async def resolve_url(name: str) -> list[str]:
    """Resolves `dns+http://NAME:PORT` to one URL per address. Raises OSError, or UnicodeError for an invalid name."""
    parts = urlsplit(name)
    found = await anyio.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    # An address with a scope (%) works on one link only.
    hosts = sorted(host for host in {str(address[0]) for _, _, _, _, address in found} if "%" not in host)
    return [f"http://[{host}]:{parts.port}" if ":" in host else f"http://{host}:{parts.port}" for host in hosts]


def _is_name(url: str) -> bool:
    return url.startswith(f"{DNS_SCHEME}:")
