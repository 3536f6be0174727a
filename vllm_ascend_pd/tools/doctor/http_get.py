# SPDX-License-Identifier: Apache-2.0
"""What HTTP servers answer to the doctor: within a time, and never more than a bound."""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import anyio
import yarl
from aiohttp.http_exceptions import HttpProcessingError

from vllm_ascend_pd.core.hosts import is_loopback, normal_host
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.transport.http_session import time_limits

TIMEOUT_S = 5.0
MAX_BODY_BYTES = 1 << 20
_CHARS = 200
_NO_LIMITS = time_limits(None, None)  # TIMEOUT_S bounds the whole


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer. Without one, `status` is 0 and `problem` says why. `sent` and `received` are unix seconds."""

    status: int
    body: bytes
    date: str | None
    sent: float
    received: float
    problem: str = ""


def server_of(url: str) -> tuple[str, str, int | None]:
    """Returns scheme, host and port, in which two URLs of one server are alike however they are written."""
    try:
        parts = yarl.URL(url)
        host = normal_host(parts.raw_host or "")
    except ValueError:  # servers say what they like
        return "", url, None
    return parts.scheme, "localhost" if is_loopback(host) else host, parts.port


def root_url(text: str) -> str:
    """Returns `text` without a slash at its end. Raises ValueError if it is not the root URL of an HTTP server."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isascii()
        yarl.URL(text)
    except ValueError:  # a port that is no number, or an unclosed bracket
        usable = False
    if not usable:
        raise ValueError(f"{one_line(text, _CHARS)!r} is not a URL such as http://10.0.0.1:8100")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError("give only scheme, host and port of a URL, without a path or user")
    return text.rstrip("/")


def _reason(failure: OSError) -> str:
    """Without the words that aiohttp and asyncio add, such as `ssl:default` for http:// URLs."""
    if isinstance(failure, (ssl.SSLError, socket.gaierror)) or not failure.errno:
        return failure.strerror or str(failure) or type(failure).__name__
    return os.strerror(failure.errno)


async def get(session: aiohttp.ClientSession, url: str, max_bytes: int = MAX_BODY_BYTES) -> HttpAnswer:
    """Never raises for what a server does."""
    sent = time.time()
    body = bytearray()
    try:
        with anyio.fail_after(TIMEOUT_S):
            response = await session.get(url, allow_redirects=False, timeout=_NO_LIMITS)
            try:
                received = time.time()
                while piece := await response.content.readany():
                    body += piece
                    if len(body) > max_bytes:
                        return HttpAnswer(0, b"", None, sent, received, f"sent more than {max_bytes >> 10} KiB")
            finally:
                response.close()
        return HttpAnswer(response.status, bytes(body), response.headers.get("date"), sent, received)
    except TimeoutError:
        problem = f"did not answer within {TIMEOUT_S:g} s"
    except aiohttp.ClientConnectorError as failure:
        problem = f"cannot be connected to: {one_line(_reason(failure.os_error), _CHARS)}"
    except (aiohttp.ClientError, HttpProcessingError, OSError) as failure:
        problem = f"broke off: {one_line(str(failure), _CHARS) or type(failure).__name__}"
    return HttpAnswer(0, b"", None, sent, time.time(), problem)
