# SPDX-License-Identifier: Apache-2.0
"""Checks the URLs that tickets are posted to. They come from clients, who must not make the engine call other hosts."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from vllm_ascend_pd.core.hosts import in_words, is_loopback, normal_host
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import is_signed_metaserver
from vllm_ascend_pd.transport.http_client import MAX_URL_CHARS, HttpUrl, parse_url

# PyMotor's URL says which attempt at a request it is for.
_ATTEMPT = re.compile(r"\?attempt=\d{1,9}\Z", re.ASCII)

_REMEMBERED = 64  # URLs whose check is remembered: a proxy names the same one with every request


class Admitted(NamedTuple):
    """A URL that may be posted to."""

    # As it was parsed for the check: connect to this.
    url: httpx.URL
    # Whether a proxy with the cluster's secret has named it.
    is_signed: bool


class Allowlist:
    """The URLs that may be posted to. Any thread may call it.

    Entries are `scheme://host[:port][/path-prefix]`. Beside these, a URL with the signature of a proxy that has the
    cluster's secret is allowed. Without entries and without a secret, only `METASERVER_PATH` on this host's own
    addresses is. A URL may end in `?attempt=NUMBER`, which entries do not name.
    """

    def __init__(self, entries: Sequence[str], own_host: str, secret: Secret | None = None) -> None:
        """`secret`: the cluster's; None: it has none. Raises ValueError for an entry that is not a URL."""
        self._entries = []
        for entry in entries:
            try:
                self._entries.append(parse_url(entry))
            except ValueError as error:
                raise ValueError(f"peers: {entry!r}: {error}") from error
        self._own_host = normal_host(own_host)
        self._secret = secret
        self._checked = functools.lru_cache(_REMEMBERED)(self._check)

        places = [] if secret is None else ["those with the signature of this cluster's proxies"]
        if entries:
            places.append(in_words(entries))
        # The places in words, for logs.
        self.admitted = ", ".join(places) or f"this host only, path {METASERVER_PATH} (peers names no URL)"

    def refusal(self, url: str, signature: str = "") -> str | None:
        """Returns why `url` must not be posted to, or None if it may. `signature`: "" if none came with it."""
        found = self._find(url, signature)
        return found if isinstance(found, str) else None

    def admit(self, url: str, signature: str = "") -> Admitted:
        """Returns the URL that may be posted to. Raises PermissionError with the reason if it must not."""
        found = self._find(url, signature)
        if isinstance(found, str):
            raise PermissionError(found)
        return found

    def _find(self, url: str, signature: str) -> Admitted | str:
        return self._checked(url, signature) if len(url) <= MAX_URL_CHARS else f"longer than {MAX_URL_CHARS} characters"

    def _check(self, url: str, signature: str) -> Admitted | str:
        attempt = found[0] if (found := _ATTEMPT.search(url)) else ""
        try:
            target = parse_url(url.removesuffix(attempt))
        except ValueError as error:
            return str(error)
        to = target.url.copy_with(query=attempt[1:].encode()) if attempt else target.url
        if self._secret is not None and signature and is_signed_metaserver(self._secret, signature, url):
            return Admitted(to, is_signed=True)
        reason = self._refusal_of_unsigned(target, bool(signature))
        return Admitted(to, is_signed=False) if reason is None else reason

    def _refusal_of_unsigned(self, target: HttpUrl, is_wrong: bool) -> str | None:
        """`is_wrong`: whether there is a signature, which is not this cluster's."""
        if any(_admits(entry, target) for entry in self._entries):
            return None
        if self._secret is not None:
            found = "its signature is wrong" if is_wrong else "the proxy has not signed it"
            return f"{found}: give the proxy this engine's secret file (--secret-file), or name the URL in peers"
        if self._entries:
            return "matches no URL in peers"
        if target.path != METASERVER_PATH:
            return f"its path is not {METASERVER_PATH}"
        if target.host != self._own_host and not is_loopback(target.host):
            return "neither loopback nor this host; name it in peers if it is yours"
        return None


def _admits(entry: HttpUrl, target: HttpUrl) -> bool:
    if (entry.scheme, entry.host, entry.port) != (target.scheme, target.host, target.port):
        return False
    if not entry.path:
        return target.path == METASERVER_PATH
    return target.path == entry.path or target.path.startswith(entry.path.rstrip("/") + "/")
