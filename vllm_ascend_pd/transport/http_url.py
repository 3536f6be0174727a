# SPDX-License-Identifier: Apache-2.0
"""Parses URLs that clients name, by the parser that the HTTP client connects with."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from vllm_ascend_pd.core.hosts import authority, is_host, looks_numeric, normal_host

MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HttpUrl:
    """An HTTP URL without user, query and fragment."""

    url: httpx.URL
    """What to connect to."""
    scheme: str
    """`http` or `https`."""
    host: str
    """In normal form, without brackets."""
    port: int
    """The scheme's own if the URL has none."""
    path: str
    """Without `.` and `..`. Empty if nothing follows the host."""


def parse_url(text: str) -> HttpUrl:
    """Raises ValueError with the reason, for spellings that parsers read in different ways, too."""
    if len(text) > MAX_URL_CHARS:
        raise ValueError(f"longer than {MAX_URL_CHARS} characters")
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("contains spaces, control or non-ASCII characters")
    for character in "@#?%\\":
        if character in text:
            raise ValueError(f"contains {character!r}")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a URL: {error}") from error
    if url.scheme not in _PORTS:
        raise ValueError("not http or https")
    host = url.raw_host.decode("ascii").lower()
    if not is_host(host) or looks_numeric(host):
        raise ValueError("its host is neither an address nor a name")
    port = _PORTS[url.scheme] if url.port is None else url.port
    if not 0 < port < 65536:
        raise ValueError(f"port {port} does not exist")
    written, slash, _ = text.partition("://")[2].lower().partition("/")
    # httpx reads `[::1]8000`, `host:8_0` and `host:`, too.
    if authority(host, port) not in (written, f"{written}:{port}"):
        raise ValueError("its host and port are not written as HOST or HOST:PORT")
    return HttpUrl(url, url.scheme, normal_host(host), port, url.raw_path.decode("ascii") if slash else "")
