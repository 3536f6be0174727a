# SPDX-License-Identifier: Apache-2.0
"""HTTP to the metaserver: one message at a time, and errors in words for the operator."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import anyio
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from vllm_ascend_pd.core.metaserver import (
    FAILURE_SUFFIX,
    RECOMPUTES_HEADER,
    WAITING_SUFFIX,
    TransferFailure,
    WaitingAnswer,
    WaitingQuestion,
)
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.transport.http_session import NotSent, TimedBody, open_session, read_at_most, time_limits
from vllm_ascend_pd.transport.keys import read_text_secret

_MAX_BODY_BYTES = 64 * 1024
_MAX_SHOWN_CHARS = 200
_WRITE_TIMEOUT_S = 10.0
"""For sending one message."""
_FAILURE_TIMEOUT_S = 10.0
"""For reporting a failed transfer, in total. A client that waits for the reason has given up by then."""
_ASK_TIMEOUT_S = 10.0
"""For asking which tickets wait, in total."""
_MAX_SIDE_MESSAGES = 16
"""Failure reports and questions at the same time. They never wait for the connections of posts, which stay busy until
prefill ends."""

_LOST = (aiohttp.ClientConnectionError, HttpProcessingError, aiohttp.ClientResponseError, aiohttp.ClientPayloadError)
_FAILURES = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError)


class FinalError(Exception):
    """The post failed and is not retried. The text is the reason in its outcome."""


class RetryableError(Exception):
    """This attempt failed; another one may succeed. The text follows the URL in a sentence."""


class MetaserverHttp:
    """Messages to metaservers. The thread of one event loop owns it; `__init__` may run on another thread."""

    def __init__(self, settings: MetaserverSettings) -> None:
        """Raises `OSError` or `SecretFileError` for a certificate or token that cannot be read."""
        self._settings = settings
        self._ssl_context = _ssl_context(settings)
        self._headers = _headers(settings)
        self._time_limits = time_limits(settings.connect_timeout_s, settings.read_timeout_s)
        self._side_messages = asyncio.Semaphore(_MAX_SIDE_MESSAGES)
        self._opened: aiohttp.ClientSession | None = None

    @owned
    async def post(self, url: str, content: bytes) -> None:
        """Posts once. Raises `FinalError` or `RetryableError` unless the metaserver accepted the ticket."""
        try:
            status, body = await self._send(url, content, self._time_limits)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if (failure := _tls_failure(error)) is not None:
                raise FinalError(f"metaserver {url}: {failure}") from error
            raise RetryableError(
                f"is unreachable: {_describe(error)}; is the proxy running, and reachable from here?"
            ) from error
        except NotSent as error:
            raise FinalError(
                f"metaserver {url} did not read the ticket within {_WRITE_TIMEOUT_S:g} s: the proxy hangs"
            ) from error
        except TimeoutError as error:
            assert self._settings.read_timeout_s is not None
            raise FinalError(no_answer(url, self._settings.read_timeout_s)) from error
        except (aiohttp.ClientResponseError, HttpProcessingError) as error:
            raise FinalError(
                f"metaserver {url} does not speak HTTP ({_describe(error)}): check scheme and port"
            ) from error
        except aiohttp.ClientPayloadError as error:
            raise FinalError(f"metaserver {url} closed the connection in the middle of its answer") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RetryableError(f"closed the connection without an answer; {self._why_closed(url)}") from error
        _judge(url, status, body)

    @owned
    async def report(self, url: str, failure: TransferFailure) -> str | None:
        """Reports a failed transfer. Returns why that did not work, or None. A repeated report does no harm."""
        try:
            with anyio.fail_after(_FAILURE_TIMEOUT_S):
                status, _ = await self._say(url + FAILURE_SUFFIX, msgspec.json.encode(failure))
        except _FAILURES as error:
            return _describe(error)
        return f"it answered {status}" if status >= 500 else None

    @owned
    async def still_waiting(self, url: str, ticket_ids: list[str]) -> frozenset[str] | None:
        """Asks which tickets wait for prefill, at most `MAX_ASKED`. Returns None if the metaserver gave no answer or
        does not have this endpoint.
        """
        try:
            with anyio.fail_after(_ASK_TIMEOUT_S):
                question = msgspec.json.encode(WaitingQuestion(ticket_ids))
                status, body = await self._say(url + WAITING_SUFFIX, question)
        except _FAILURES:
            return None
        if status != 200:
            return None
        try:
            return frozenset(msgspec.json.decode(body, type=WaitingAnswer).waiting)
        except UNREADABLE:
            return None

    @owned
    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _say(self, url: str, content: bytes) -> tuple[int, bytes]:
        limits = time_limits(_FAILURE_TIMEOUT_S, _FAILURE_TIMEOUT_S)
        async with self._side_messages:
            try:
                return await self._send(url, content, limits)
            except _LOST:  # for instance an idle connection that the server closed at that moment
                return await self._send(url, content, limits)

    async def _send(self, url: str, content: bytes, limits: aiohttp.ClientTimeout) -> tuple[int, bytes]:
        """Returns status and body of the answer, at most the first 64 KiB of it."""
        message = TimedBody(content, _WRITE_TIMEOUT_S)
        response = await self._session().post(url, data=message, timeout=limits, allow_redirects=False)
        try:
            return response.status, await read_at_most(response, _MAX_BODY_BYTES)
        finally:
            response.close()  # closes the connection too, unless the whole answer was read

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # it needs a running loop
            self._opened = open_session(headers=self._headers, ssl_context=self._ssl_context)
        return self._opened

    def _why_closed(self, url: str) -> str:
        """Returns why the server may have closed the connection. With TLS 1.3, a server that refuses the client
        certificate closes it without a reason.
        """
        if not url.startswith("https:"):
            return "did it restart?"
        if self._settings.cert_file is None:
            return "did it restart, or does it want a client certificate (tls_config.ssl_certfile)?"
        return "did it restart, or does it not trust our client certificate (tls_config.ssl_certfile)?"


def _tls_failure(error: aiohttp.ClientError) -> str | None:
    """Returns the reason if TLS failed, else None."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause: BaseException = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    else:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = clean(cause.verify_message).rstrip(".")
        return f"its certificate is refused: {reason}; check it, and tls_config.ssl_ca_certs"
    return f"TLS failed: {clean(str(cause))}; check scheme and port" if isinstance(cause, ssl.SSLError) else None


def no_answer(url: str, seconds: float) -> str:
    return f"metaserver {url} did not answer within {seconds:g} s: prefill is overloaded or the proxy hangs"


def _judge(url: str, status: int, body: bytes) -> None:
    """Returns if the metaserver accepted the ticket. Otherwise raises FinalError or RetryableError."""
    if 200 <= status < 300:
        return
    failure = _metaserver_error(body) if status == 502 else None
    if failure is not None:
        raise FinalError(f"metaserver {url} reports that prefill failed: {failure}")
    answer = f"answered {status}: {clean(body.decode(errors='replace')) or '(empty)'}"
    if status >= 500:
        raise RetryableError(f"{answer}; see the proxy's log")
    if status < 400:
        raise FinalError(f"metaserver {url} {answer}: redirects are not followed, give the final URL")
    raise FinalError(
        f"metaserver {url} {answer}: it does not know this request or refuses this engine; see the proxy's log"
    )


def _metaserver_error(body: bytes) -> str | None:
    """Returns the text of `{"error": ...}`. A metaserver reports a failed prefill so; a gateway in front of it does
    not.
    """
    try:
        answer = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    if not isinstance(answer, dict) or "error" not in answer:
        return None
    error = answer["error"]
    return clean(error if isinstance(error, str) else msgspec.json.encode(error).decode())


def _headers(settings: MetaserverSettings) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if settings.recomputes:
        headers[RECOMPUTES_HEADER] = "1"
    if settings.token_file is not None:
        headers["Authorization"] = f"Bearer {read_text_secret(settings.token_file)}"
    return headers


def _ssl_context(settings: MetaserverSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.cert_file is not None:
        # A function: without one, a key that has a password would ask for it on the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, lambda: settings.key_password or "")
    return context


def _describe(error: Exception) -> str:
    return clean(str(error)) or type(error).__name__


def clean(text: str) -> str:
    """Returns text from another process as one short printable line."""
    return one_line(text, _MAX_SHOWN_CHARS)
