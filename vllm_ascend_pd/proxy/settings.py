# SPDX-License-Identifier: Apache-2.0
"""What the operator chooses, checked once."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from vllm_ascend_pd.core.protocol import METASERVER_PATH

MIB = 1024 * 1024


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError, in words meant for the operator, when a value cannot work."""

    prefill: tuple[str, ...]
    """Root URLs of the prefill engines, such as `http://10.0.0.1:8100`."""
    decode: tuple[str, ...]
    """Root URLs of the decode engines."""
    metaserver_url: str
    """Where decode engines post their tickets: this proxy, as they can reach it."""
    connect_timeout: float = 5.0
    """Seconds to open a connection to an engine, or to wait for a free one."""
    read_timeout: float = 600.0
    """Seconds an engine, or a client that sends or reads, may stay silent."""
    health_timeout: float = 2.0
    """Seconds an engine has to answer a health probe."""
    max_concurrent: int = 1024
    """Client requests in flight; further ones are answered 429."""
    max_body_bytes: int = 64 * MIB
    """Largest client request: images travel inside it."""
    max_ticket_bytes: int = 8 * MIB
    """Largest ticket: its block ids take about 8 bytes per 128 tokens and cache group."""

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls:
                raise ValueError(f"at least one {role} engine is needed")
            for url in urls:
                _check_engine_url(role, url)
            if len({url.rstrip("/") for url in urls}) < len(urls):
                raise ValueError(f"the same {role} engine is given twice")
        if not _is_http(self.metaserver_url):
            raise ValueError(f"the metaserver URL {self.metaserver_url!r} is not an http(s) URL")
        for name in (
            "connect_timeout",
            "read_timeout",
            "health_timeout",
            "max_concurrent",
            "max_body_bytes",
            "max_ticket_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name.replace('_', ' ')} must be greater than 0")


def default_metaserver_url(host: str, port: int) -> str:
    """The metaserver's URL of a proxy that listens on `host`: only right if engines can reach that address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}{METASERVER_PATH}"
    if address.is_unspecified:
        raise ValueError(
            f"decode engines cannot reach {host}: say where they find this proxy, "
            f"with --metaserver-url http://ADDRESS:{port}{METASERVER_PATH}"
        )
    authority = f"[{host}]" if address.version == 6 else host
    return f"http://{authority}:{port}{METASERVER_PATH}"


def _check_engine_url(role: str, url: str) -> None:
    if not _is_http(url):
        raise ValueError(f"{role} engine {url!r} is not a URL such as http://10.0.0.1:8100")
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{role} engine {url!r}: give only scheme, host and port, without a path or user")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or an unclosed bracket
        return False


def without_slash(urls: Sequence[str]) -> tuple[str, ...]:
    """Root URLs to which a path can be appended."""
    return tuple(url.rstrip("/") for url in urls)
