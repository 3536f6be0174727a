# SPDX-License-Identifier: Apache-2.0
"""HTTP to the metaserver: one message at a time, and what became of it in words."""

from __future__ import annotations

import ssl

import anyio
import httpx
import msgspec

from vllm_ascend_pd.core.http_pool import IDLE_CONNECTION_S
from vllm_ascend_pd.core.metaserver import (
    FAILURE_SUFFIX,
    RECOMPUTES_HEADER,
    WAITING_SUFFIX,
    TransferFailure,
    WaitingAnswer,
    WaitingQuestion,
)
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.transport.secret_files import read_text_secret

_MAX_BODY_BYTES = 64 * 1024
# Beside those of posts, which keep theirs until prefill has ended: just then failures have to be told.
_CONNECTIONS_TO_TELL = 16
_MAX_SHOWN_CHARS = 200
_FAILURE_TIMEOUT_S = 10.0
"""For telling the metaserver of a failed transfer, all in all: whoever waits for the reason has given up by then."""
_ASK_TIMEOUT_S = 10.0
"""For asking it which tickets wait, all in all."""


class FinalError(Exception):
    """The post failed for good; the text is the outcome's reason."""


class RetryableError(Exception):
    """This attempt failed, the next may not; the text goes behind the URL."""


class MetaserverHttp:
    """A bounded pool of connections, all used on one event loop."""

    def __init__(self, settings: MetaserverSettings) -> None:
        """Raises `OSError` or `SecretFileError` for a certificate or token that cannot be read."""
        self._settings = settings
        self._transport, self._client = _http_client(settings)

    async def post(self, url: str, content: bytes) -> None:
        """One attempt. Raises `FinalError` or `RetryableError` unless the metaserver accepted it."""
        try:
            async with self._client.stream("POST", url, content=content) as response:
                body = await _read(response)
        except httpx.ReadError as error:  # a reset: the server left bytes of ours unread
            raise RetryableError(f"closed the connection without an answer; {self._why_closed(url)}") from error
        except (httpx.NetworkError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            if (failure := _tls_failure(error)) is not None:
                raise FinalError(f"metaserver {url}: {failure}") from error
            raise RetryableError(
                f"is unreachable: {_describe(error)}; is the proxy running, and reachable from here?"
            ) from error
        except httpx.ReadTimeout as error:
            assert self._settings.read_timeout_s is not None
            raise FinalError(no_answer(url, self._settings.read_timeout_s)) from error
        except httpx.RemoteProtocolError as error:
            if "disconnected without sending a response" in str(error):
                raise RetryableError(f"closed the connection without an answer; {self._why_closed(url)}") from error
            raise FinalError(
                f"metaserver {url} does not speak HTTP ({_describe(error)}): check scheme and port"
            ) from error
        _judge(url, response.status_code, body)

    async def tell(self, url: str, failure: TransferFailure) -> str | None:
        """Of a failed transfer; returns why that could not be done. To be told twice does no harm."""
        try:
            with anyio.fail_after(_FAILURE_TIMEOUT_S):
                status, _ = await self._say(url + FAILURE_SUFFIX, msgspec.json.encode(failure))
        except (TimeoutError, httpx.HTTPError) as error:
            return _describe(error)
        return f"it answered {status}" if status >= 500 else None

    async def still_waiting(self, url: str, ticket_ids: list[str]) -> frozenset[str] | None:
        """Which tickets, of at most `MAX_ASKED`, the metaserver says wait for prefill. None: it did not say, or is of
        other make and does not know the question."""
        try:
            with anyio.fail_after(_ASK_TIMEOUT_S):
                question = msgspec.json.encode(WaitingQuestion(ticket_ids))
                status, body = await self._say(url + WAITING_SUFFIX, question)
        except (TimeoutError, httpx.HTTPError):
            return None
        if status != 200:
            return None
        try:
            return frozenset(msgspec.json.decode(body, type=WaitingAnswer).waiting)
        except UNREADABLE:
            return None

    async def _say(self, url: str, content: bytes) -> tuple[int, bytes]:
        try:
            return await self._say_once(url, content)
        except (httpx.NetworkError, httpx.RemoteProtocolError):  # an idle connection that was just being closed
            return await self._say_once(url, content)

    async def _say_once(self, url: str, content: bytes) -> tuple[int, bytes]:
        async with self._client.stream("POST", url, content=content, timeout=_FAILURE_TIMEOUT_S) as response:
            body = await _read(response)  # be it to use the connection again
            return response.status_code, body

    async def close_unused(self) -> None:
        """Connections that have been idle for `IDLE_CONNECTION_S`, that the other side has closed, or that are lost. To
        be called now and then: httpx looks for the first two only when it sends a request, and never for the third.

        A post that is cancelled when its new connection stands, but before it has sent anything, leaves that connection
        in the pool: in nobody's use and not idle either, for good (httpcore 1.0.9).
        """
        pool = self._transport._pool
        for connection in pool.connections:
            # Looked at anew for each: while the last one was being closed, posts began.
            in_use = any(request.connection is connection for request in pool._requests)
            if connection.has_expired() if connection.is_idle() else not in_use:
                await connection.aclose()  # closed before anything is awaited: no request can have got it meanwhile

    async def close(self) -> None:
        await self._client.aclose()

    def _why_closed(self, url: str) -> str:
        """A server that wants another client certificate hangs up: TLS 1.3 has no better moment to say so."""
        if not url.startswith("https:"):
            return "did it restart?"
        if self._settings.cert_file is None:
            return "did it restart, or does it want a client certificate (tls_config.ssl_certfile)?"
        return "did it restart, or does it not trust our client certificate (tls_config.ssl_certfile)?"


def _tls_failure(error: BaseException) -> str | None:
    """What was wrong with TLS, if it is that which failed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = clean(cause.verify_message).rstrip(".")
        return f"its certificate is refused: {reason}; check it, and tls_config.ssl_ca_certs"
    return f"TLS failed: {clean(str(cause))}; check scheme and port"


def no_answer(url: str, seconds: float) -> str:
    return f"metaserver {url} did not answer within {seconds:g} s: prefill is overloaded or the proxy hangs"


def _judge(url: str, status: int, body: bytes) -> None:
    """Return when the metaserver accepted the post, raise what its answer means otherwise."""
    if 200 <= status < 300:
        return
    failure = _metaserver_error(body) if status == 502 else None
    if failure is not None:
        raise FinalError(f"prefill failed, says metaserver {url}: {failure}")
    answer = f"answered {status}: {clean(body.decode(errors='replace')) or '(empty)'}"
    if status >= 500:
        raise RetryableError(f"{answer}; see the proxy's log")
    if status < 400:
        raise FinalError(f"metaserver {url} {answer}: redirects are not followed, give the final URL")
    raise FinalError(
        f"metaserver {url} {answer}: it does not know this request or refuses this engine; see the proxy's log"
    )


def _metaserver_error(body: bytes) -> str | None:
    """The text of `{"error": ...}`: how a metaserver, unlike a gateway before it, reports a failed prefill."""
    try:
        answer = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    if not isinstance(answer, dict) or "error" not in answer:
        return None
    error = answer["error"]
    return clean(error if isinstance(error, str) else msgspec.json.encode(error).decode())


async def _read(response: httpx.Response) -> bytes:
    """At most the first 64 KiB of the body."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) >= _MAX_BODY_BYTES:
            break
    return bytes(body[:_MAX_BODY_BYTES])


def _http_client(settings: MetaserverSettings) -> tuple[httpx.AsyncHTTPTransport, httpx.AsyncClient]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if settings.recomputes:
        headers[RECOMPUTES_HEADER] = "1"
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.cert_file is not None:
        # A function: without one, a key that has a password would ask for it on the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, lambda: settings.key_password or "")
    if settings.token_file is not None:
        headers["Authorization"] = f"Bearer {read_text_secret(settings.token_file)}"
    transport = httpx.AsyncHTTPTransport(
        verify=context,
        limits=httpx.Limits(
            max_connections=settings.max_connections + _CONNECTIONS_TO_TELL, keepalive_expiry=IDLE_CONNECTION_S
        ),
        trust_env=False,
    )
    client = httpx.AsyncClient(
        transport=transport,
        headers=headers,
        timeout=httpx.Timeout(
            connect=settings.connect_timeout_s,
            read=settings.read_timeout_s,
            write=settings.write_timeout_s,
            pool=settings.pool_timeout_s,
        ),
        follow_redirects=False,
        trust_env=False,  # no HTTP_PROXY: what the allow-list admits is reached directly
    )
    return transport, client


def _describe(error: Exception) -> str:
    return clean(str(error)) or type(error).__name__


def clean(text: str) -> str:
    """Text from outside as one short printable line."""
    return one_line(text, _MAX_SHOWN_CHARS)
