# SPDX-License-Identifier: Apache-2.0
"""Checks the URLs that tickets are posted to. They come from clients, who must not make the engine call other hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yarl

from vllm_ascend_pd.core.hosts import in_words, is_host, is_loopback, looks_numeric, normal_host
from vllm_ascend_pd.core.protocol import METASERVER_PATH

_SCHEMES = ("http", "https")
_MAX_URL_CHARS = 2048


class Allowlist:
    """The URLs that may be posted to.

    Entries are `scheme://host[:port][/path-prefix]`. Without entries, only `METASERVER_PATH` on this host's own
    addresses is allowed.
    """

    def __init__(self, entries: Sequence[str], own_host: str) -> None:
        """Raises ValueError for an entry that is not a URL."""
        self._entries = [_parse_entry(entry) for entry in entries]
        self._own_host = normal_host(own_host)
        # The places in words, for logs.
        self.admitted = in_words(entries) or f"this host only, path {METASERVER_PATH} (metaserver_allowlist is empty)"

    def refusal(self, url: str) -> str | None:
        """Returns why `url` must not be posted to, or None if it may."""
        try:
            target = _Target.parse(url)
        except ValueError as error:
            return str(error)
        if self._entries:
            if any(entry.admits(target) for entry in self._entries):
                return None
            return "matches no entry of the metaserver allow-list"
        if target.path != METASERVER_PATH:
            return f"its path is not {METASERVER_PATH}"
        if target.host != self._own_host and not is_loopback(target.host):
            return "neither loopback nor this host; name it in the metaserver allow-list if it is yours"
        return None


@dataclass(frozen=True)
class _Target:
    """The parts of a URL that are compared."""

    scheme: str
    """`http` or `https`."""
    host: str
    """In normal form, without brackets."""
    port: int
    """The scheme's own if the URL has none."""
    path: str
    """Without `.` and `..`."""

    @classmethod
    def parse(cls, url: str) -> _Target:
        """Raises `ValueError` with the reason. The HTTP client uses the same parser."""
        if len(url) > _MAX_URL_CHARS:
            raise ValueError(f"longer than {_MAX_URL_CHARS} characters")
        if not re.fullmatch(r"[!-~]+", url):
            raise ValueError("contains spaces, control or non-ASCII characters")
        for character in "@#?%\\":
            if character in url:
                raise ValueError(f"contains {character!r}")
        try:
            parsed = yarl.URL(url)
            port = parsed.port
        except ValueError as error:
            raise ValueError(f"not a URL: {error}") from error
        if parsed.scheme not in _SCHEMES:
            raise ValueError("not http or https")
        host = parsed.raw_host or ""
        if not is_host(host) or looks_numeric(host):
            raise ValueError("its host is neither an address nor a name")
        if port is None or not 0 < port < 65536:
            raise ValueError(f"port {port} does not exist")
        path = parsed.path if "/" in url.partition("://")[2] else ""
        return cls(parsed.scheme, normal_host(host), port, path)

    def admits(self, other: _Target) -> bool:
        """Whether this allow-list entry admits the URL `other`."""
        if (self.scheme, self.host, self.port) != (other.scheme, other.host, other.port):
            return False
        if not self.path:
            return other.path == METASERVER_PATH
        return other.path == self.path or other.path.startswith(self.path.rstrip("/") + "/")


def _parse_entry(entry: str) -> _Target:
    try:
        return _Target.parse(entry)
    except ValueError as error:
        raise ValueError(f"metaserver allow-list entry {entry!r}: {error}") from error
