# SPDX-License-Identifier: Apache-2.0
"""Checks the URLs that tickets are posted to. They come from clients, who must not make the engine call other hosts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import httpx

from vllm_ascend_pd.core.hosts import in_words, is_loopback, normal_host
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.transport.http_client import MAX_URL_CHARS, HttpUrl, parse_url

_REMEMBERED = 64  # URLs whose check is remembered: a proxy names the same one with every request


class Allowlist:
    """The URLs that may be posted to. Any thread may call it.

    Entries are `scheme://host[:port][/path-prefix]`. Without entries, only `METASERVER_PATH` on this host's own
    addresses is allowed.
    """

    def __init__(self, entries: Sequence[str], own_host: str) -> None:
        """Raises ValueError for an entry that is not a URL."""
        self._entries = []
        for entry in entries:
            try:
                self._entries.append(parse_url(entry))
            except ValueError as error:
                raise ValueError(f"peers: {entry!r}: {error}") from error
        self._own_host = normal_host(own_host)
        # The places in words, for logs.
        self.admitted = in_words(entries) or f"this host only, path {METASERVER_PATH} (peers names no URL)"
        self._checked = functools.lru_cache(_REMEMBERED)(self._check)

    def refusal(self, url: str) -> str | None:
        """Returns why `url` must not be posted to, or None if it may."""
        found = self._find(url)
        return found if isinstance(found, str) else None

    def admit(self, url: str) -> httpx.URL:
        """Returns `url` as it was parsed for the check: connect to this. Raises PermissionError with the reason."""
        found = self._find(url)
        if isinstance(found, str):
            raise PermissionError(found)
        return found

    def _find(self, url: str) -> httpx.URL | str:
        return self._checked(url) if len(url) <= MAX_URL_CHARS else f"longer than {MAX_URL_CHARS} characters"

    def _check(self, url: str) -> httpx.URL | str:
        try:
            target = parse_url(url)
        except ValueError as error:
            return str(error)
        if self._entries:
            if not any(_admits(entry, target) for entry in self._entries):
                return "matches no URL in peers"
        elif target.path != METASERVER_PATH:
            return f"its path is not {METASERVER_PATH}"
        elif target.host != self._own_host and not is_loopback(target.host):
            return "neither loopback nor this host; name it in peers if it is yours"
        return target.url


def _admits(entry: HttpUrl, target: HttpUrl) -> bool:
    if (entry.scheme, entry.host, entry.port) != (target.scheme, target.host, target.port):
        return False
    if not entry.path:
        return target.path == METASERVER_PATH
    return target.path == entry.path or target.path.startswith(entry.path.rstrip("/") + "/")
