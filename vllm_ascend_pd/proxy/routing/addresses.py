# SPDX-License-Identifier: Apache-2.0
"""Checks the URLs of engines as an operator writes them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

DNS_SCHEME = "dns+http"
"""`dns+http://NAME:PORT` stands for one engine at each address to which the name resolves, now and later."""
_EXAMPLE = "http://10.0.0.1:8100"
_LABEL = re.compile("[A-Za-z0-9_-]{1,63}")


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
