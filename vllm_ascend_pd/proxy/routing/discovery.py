# SPDX-License-Identifier: Apache-2.0
"""Where engines come from: the operator's URLs, and the DNS names among them, which are looked up at an interval."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import anyio

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, TooManyEnginesError

log = logging.getLogger(__name__)

COMMAND_LINE = "the command line"
DNS_SCHEME = "dns+http"
"""`dns+http://NAME:PORT` stands for one engine at each address to which the name resolves, now and later."""
_EXAMPLE = "http://10.0.0.1:8100"
_LABEL = re.compile("[A-Za-z0-9_-]{1,63}")
_LOOKUP_SECONDS = 10.0
"""Resolvers ask each of up to three servers twice, for 5 s each time; that would take longer than useful."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Resolves a `dns+http` URL, as `resolve_url` does."""


def check_engine_url(role: str, url: str, schemes: Sequence[str] = ("http", "https", DNS_SCHEME)) -> str:
    """Returns the URL without a trailing slash, so that a path can be appended, and in lower case, so that a host has
    one spelling. Raises ValueError with a message for the operator."""
    if not url.isprintable() or not _has_host(url, schemes):
        raise ValueError(f"{role} engine {url!r} is not a URL such as {_EXAMPLE}")
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{role} engine {url!r}: give only scheme, host and port, without a path or user")
    if parts.scheme == DNS_SCHEME and parts.port is None:
        raise ValueError(f"{role} engine {url!r}: give the port")
    return url.rstrip("/").lower()


def check_engine_urls(role: str, urls: Sequence[str]) -> tuple[str, ...]:
    """Checks each URL by `check_engine_url`, and that no two are the same. Raises ValueError."""
    roots = tuple(check_engine_url(role, url) for url in urls)
    if len(set(roots)) < len(roots):
        raise ValueError(f"the same {role} engine is given twice")
    return roots


def is_http(url: str) -> bool:
    """Whether a URL is `http` or `https` and has a usable host."""
    return _has_host(url, ("http", "https"))


def _has_host(url: str, schemes: Sequence[str]) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and _is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # the port is no number, or a bracket is not closed
        return False


def _is_host(host: str) -> bool:
    """Whether a host is an address or a name that resolvers accept. They fail in various ways on other text."""
    if ":" in host:
        ipaddress.IPv6Address(host)
        return "%" not in host
    return len(host) <= 253 and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))


class Discovery:
    """Adds the engines of the command line, and adds and removes those of its DNS names as answers change.

    An engine stays as long as the command line or any name has it.
    """

    def __init__(
        self,
        roles: Mapping[EngineRole, EngineRegistry],
        listed: Mapping[EngineRole, Sequence[str]],
        interval: float,
        resolve: Resolve | None = None,
    ) -> None:
        """`listed`: the command line's URLs, as `check_engine_url` returns them. `interval`: seconds between two
        lookups of all names."""
        self._resolve = resolve or resolve_url
        self._roles = roles
        self._interval = interval
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
                urls = await self._resolve(name)
        except (OSError, UnicodeError, TimeoutError) as error:
            self._problem(name, f"the name does not resolve: {str(error) or 'no answer in time'}")
            return
        self._use(name, {role: urls for role, each in self._names if each == name})

    def _use(self, source: str, urls: Mapping[EngineRole, Sequence[str]]) -> None:
        """Makes `urls` the engines of `source`, which is the command line or a name."""
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
