# SPDX-License-Identifier: Apache-2.0
"""Posts tickets from the decode engine's scheduler to the metaserver, without ever blocking the scheduler.

One task per ticket runs on the thread `metaserver-client`. Beside the tickets it reports failed transfers, and asks
which tickets still wait for prefill: their deadlines are extended (`core/protocol.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import httpx
import msgspec

from vllm_ascend_pd.core.config import ConnectorConfig, TlsConfig
from vllm_ascend_pd.core.observer import Observer, PostRetried
from vllm_ascend_pd.core.protocol import (
    FAILURE_SUFFIX,
    MAX_ASKED,
    RECOMPUTES_HEADER,
    WAITING_SUFFIX,
    TransferFailure,
    WaitingAnswer,
    WaitingQuestion,
)
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import metaserver_tokens
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.decode.ticket_client import PostOutcome, TicketClient
from vllm_ascend_pd.transport import http_client
from vllm_ascend_pd.transport.http_client import HTTP_FAILURES, clean, describe, tls_context
from vllm_ascend_pd.transport.secret_files import SecretFileError, read_text_secret

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 1024
_WRITE_TIMEOUT_S = 10.0  # for sending one message
_SIDE_TIMEOUT_S = 10.0  # for a failure report or a question, in total: a client that waits for the reason gives up then
_SIDE_MESSAGES = 8  # reports at a time, and questions. They never wait for posts, which take until prefill ends
# Before a post is sent again, at most. It doubles from the first to the last.
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 2.0
_ASK_EVERY_S = 30.0  # between two questions to a metaserver; shorter if deadlines are short


class MetaserverError(Exception):
    """The client could not be started."""


class _Metaserver(NamedTuple):
    """A metaserver, as a request names it."""

    url: str
    signature: str  # "": none came with it


@dataclass(eq=False, slots=True)
class _Post:
    """A ticket on its way. Times are `time.monotonic`'s."""

    key: str
    to: _Metaserver
    content: bytes
    posted_at: float
    latest: float  # the largest value that the deadline may get
    scope: anyio.CancelScope  # ends the post at its deadline
    extended: bool = False  # the metaserver said that the ticket waits
    has_connection: bool = False  # else the metaserver does not have the ticket: all connections here are busy

    def extend(self, deadline: float) -> None:
        """Does nothing if the deadline has passed."""
        if not self.scope.cancel_called:
            self.extended = True
            self.scope.deadline = max(self.scope.deadline, min(deadline, self.latest))


class MetaserverClient(TicketClient):
    """Posts tickets to metaservers, on the thread `metaserver-client`."""

    def __init__(
        self,
        config: ConnectorConfig,
        own_host: str,
        recomputes: bool = False,
        observer: Observer | None = None,
        secret: Secret | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`recomputes`: whether this engine computes a prompt whose KV does not arrive. It is sent with each ticket.
        `secret`: the cluster's; None: it has none. `wake`: as in `TicketClient`.

        Raises `MetaserverError` for an allow-list entry, certificate or token that cannot be used.
        """
        self._config, self._observer = config, observer or Observer()
        # Longest time from `post` to the outcome, however often the metaserver says that the ticket waits.
        self._longest_s = config.queue_timeout_s + config.transfer_timeout_s
        try:
            self._allowlist = Allowlist(config.peer_urls, own_host, secret)
        except ValueError as error:
            raise MetaserverError(str(error)) from error
        self.admitted = self._allowlist.admitted  # where tickets may be posted to, in words
        # The answer comes only when prefill ends: its deadline bounds the post.
        timeout = httpx.Timeout(config.metaserver_connect_timeout_s, read=self._longest_s, write=_WRITE_TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if recomputes:
            headers[RECOMPUTES_HEADER] = "1"
        headers_if_signed: dict[str, str] = {}
        self._tls = config.tls_config or TlsConfig()
        try:
            if config.metaserver_token_file is not None:
                headers["Authorization"] = f"Bearer {read_text_secret(config.metaserver_token_file)}"
            elif secret is not None:
                # Only to signed URLs: others are no proxies of this cluster, and would learn the token.
                headers_if_signed["Authorization"] = f"Bearer {metaserver_tokens(secret)[0]}"
            tls = tls_context(self._tls)
        except (OSError, SecretFileError) as error:  # ssl.SSLError is an OSError
            raise MetaserverError(f"a certificate or token of the metaserver cannot be read: {error}") from error
        self._headers = httpx.Headers(headers)
        self._headers_if_signed = httpx.Headers(headers | headers_if_signed)
        self._connections = http_client.Connections(timeout, tls)
        self._free = asyncio.Semaphore(config.metaserver_max_connections)
        self._reporting, self._asking = asyncio.Semaphore(_SIDE_MESSAGES), asyncio.Semaphore(_SIDE_MESSAGES)
        # The client's thread owns these two: posts by key, and metaservers with a question on its way.
        self._posts: dict[str, _Post] = {}
        self._asked: set[_Metaserver] = set()
        super().__init__("metaserver-client", wake)
        self._thread.start(self._connections.close_idle)
        self._thread.start(self._ask_at_intervals)

    # In these methods, `signature` is the URL's; "" if none came with it.

    def check(self, url: str, signature: str = "") -> str | None:
        """Returns why `url` must not be posted to, or None if it may."""
        return self._allowlist.refusal(url, signature)

    def post(self, key: str, url: str, body: dict[str, object], signature: str = "") -> None:
        """Sends `body` as JSON to `url`, if the allow-list admits it; `poll` returns the outcome. Raises ValueError if
        `key` has a post already."""
        self._begin(key, self._post, key, _Metaserver(url, signature), msgspec.json.encode(body), time.monotonic())

    def report_failure(self, url: str, failure: TransferFailure, signature: str = "") -> None:
        """Reports a failed transfer to the metaserver at `url`, where the ticket was posted, if the allow-list admits
        it. There is no outcome: without the report the client gets no reason."""
        self._tell(self._report_failure, _Metaserver(url, signature), failure)

    async def _end(self) -> None:
        await self._connections.close()

    async def _post(self, key: str, to: _Metaserver, content: bytes, posted_at: float) -> PostOutcome:
        with anyio.CancelScope(deadline=posted_at + self._config.transfer_timeout_s) as scope:
            post = _Post(key, to, content, posted_at, posted_at + self._longest_s, scope)
            self._posts[key] = post
            try:
                async with self._free:
                    post.has_connection = True
                    return await self._attempts(post)
            finally:
                del self._posts[key]
        return PostOutcome(key, False, self._why_timed_out(post))

    async def _attempts(self, post: _Post) -> PostOutcome:
        """Posts until the metaserver accepts the ticket, or no retry is left."""
        retries, attempt, where = self._config.metaserver_retries, 0, f"metaserver {clean(post.to.url)}"
        while True:
            try:
                status, body = await self._send(post.to, "", post.content)
                failure = failure_of(status, body)
            except HTTP_FAILURES as error:
                failure = _explain(post.to.url, error, self._tls.ssl_certfile is not None)
            if failure is None:
                return PostOutcome(post.key, ok=True, held=_held(body))
            if not failure.may_pass or attempt == retries:
                tried = f" ({attempt + 1} attempts)" if failure.may_pass else ""
                return PostOutcome(post.key, False, f"{where}{failure.text}{tried}", failure.may_follow)
            self._observer.on(PostRetried())
            ceiling = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
            await asyncio.sleep(random.uniform(ceiling / 2, ceiling))
            attempt += 1

    def _why_timed_out(self, post: _Post) -> str:
        seconds = f"within {self._config.transfer_timeout_s:g} s"
        if post.extended and post.scope.deadline >= post.latest:
            seconds, why = f"within {self._longest_s:g} s", "though it said that the ticket waits for prefill"
            why = f", {why} (queue_timeout_s, transfer_timeout_s): more prefill engines are needed"
        elif post.has_connection:
            why = ": prefill is overloaded or the proxy hangs"
        else:
            busy = f"all {self._config.metaserver_max_connections} connections wait for answers"
            return f"not posted to metaserver {post.to.url} {seconds}: {busy}"
        return f"metaserver {post.to.url} did not answer {seconds}{why}"

    async def _report_failure(self, to: _Metaserver, failure: TransferFailure) -> None:
        content = msgspec.json.encode(failure)
        try:
            with anyio.fail_after(_SIDE_TIMEOUT_S):
                async with self._reporting:
                    status, _ = await self._send(to, FAILURE_SUFFIX, content, repeats=1)
            problem = f"it answered {status}" if status >= 500 else None
        except HTTP_FAILURES as error:
            problem = describe(error)
        if problem is not None:
            text = "request %s: its failed transfer cannot be reported to metaserver %s: %s; its client gets no reason"
            logger.warning(text, failure.request_id, clean(to.url), problem)

    async def _ask_at_intervals(self) -> None:
        """Asks about posts that are a while old, until it is cancelled: one question per metaserver at a time."""
        every_s = min(_ASK_EVERY_S, self._config.transfer_timeout_s / 4)
        while True:
            await asyncio.sleep(every_s)
            old = time.monotonic() - every_s
            for to in {post.to for post in self._posts.values() if post.posted_at <= old} - self._asked:
                self._asked.add(to)
                self._thread.start(self._ask, to)

    async def _ask(self, to: _Metaserver) -> None:
        try:
            async with self._asking:
                await self._ask_about([post for post in self._posts.values() if post.to == to], to)
        except Exception as error:  # noqa: BLE001 - whatever it is, deadlines stay, and it is asked again
            logger.info("metaserver %s does not say which tickets wait: %s", to.url, describe(error))
        finally:
            self._asked.discard(to)

    async def _ask_about(self, posts: list[_Post], to: _Metaserver) -> None:
        named = {post.key: post for post in posts if post.has_connection}
        others = [post for post in posts if not post.has_connection]  # if the metaserver works, they come to it
        for first in range(0, max(1, len(named)), MAX_ASKED):
            question = WaitingQuestion(list(named)[first : first + MAX_ASKED])
            content, until = msgspec.json.encode(question), time.monotonic() + self._config.transfer_timeout_s
            with anyio.fail_after(_SIDE_TIMEOUT_S):
                status, body = await self._send(to, WAITING_SUFFIX, content, repeats=1)
            if status != 200:  # not every metaserver has this endpoint
                return
            waiting = set(msgspec.json.decode(body, type=WaitingAnswer).waiting)
            for post in (*(named[key] for key in waiting.intersection(question.ticket_ids)), *others):
                post.extend(until)
            others = []

    @owned
    async def _send(self, to: _Metaserver, suffix: str, content: bytes, repeats: int = 0) -> tuple[int, bytes]:
        """Posts to the metaserver's URL with `suffix`, if the allow-list admits the URL. Returns status and body of the
        answer. Raises `HTTP_FAILURES`. `repeats`: how often to send it again at once after a lost connection, as idle
        ones are."""
        url, is_signed = self._allowlist.admit(*to)
        if suffix:
            url = url.copy_with(path=url.path + suffix)  # before its query
        headers = self._headers_if_signed if is_signed else self._headers
        try:
            return await self._connections.post(url, headers, content, _MAX_BODY_BYTES)
        except http_client.CONNECTION_LOST:
            if not repeats:
                raise
        return await self._send(to, suffix, content, repeats - 1)


class PostFailure(NamedTuple):
    """Why an attempt at a post failed."""

    text: str  # follows the URL in a sentence
    may_pass: bool = False  # another attempt may succeed
    may_follow: bool = False  # a prefill under another ticket may succeed


class _Prefilled(msgspec.Struct):
    """The body with which our proxy answers an intent. Other metaservers answer a ticket with anything."""

    kv_transfer_params: dict[str, Any] | None = None


def _held(body: bytes) -> dict[str, Any] | None:
    """Returns where prefill holds the prompt, if the answer says so."""
    with contextlib.suppress(*UNREADABLE):
        return msgspec.json.decode(body, type=_Prefilled).kv_transfer_params
    return None


class _PrefillFailed(msgspec.Struct):
    """The body with which a metaserver reports a failed prefill. A gateway in front of it has another."""

    error: object
    may_follow: bool = False


def failure_of(status: int, body: bytes) -> PostFailure | None:
    """Returns what an answer to a post means: None if the metaserver accepted the ticket."""
    if 200 <= status < 300:
        return None
    if status == 502:
        with contextlib.suppress(*UNREADABLE):
            answer = msgspec.json.decode(body, type=_PrefillFailed)
            error = answer.error if isinstance(answer.error, str) else msgspec.json.encode(answer.error).decode()
            return PostFailure(f" reports that prefill failed: {clean(error)}", may_follow=answer.may_follow)
    answered = f" answered {status}: {clean(body.decode(errors='replace')) or '(empty)'}"
    if status >= 500:
        return PostFailure(f"{answered}; see the proxy's log", may_pass=True)
    if status < 400:
        return PostFailure(f"{answered}: redirects are not followed, give the final URL")
    return PostFailure(f"{answered}: it does not know this request or refuses this engine; see the proxy's log")


def _explain(url: str, error: Exception, has_certificate: bool) -> PostFailure:
    """Returns what an error of sending a ticket means, for the operator."""
    cause = http_client.innermost(error)
    match error:
        case PermissionError():
            return PostFailure(f" is refused: {error}")
        case httpx.ConnectError() if isinstance(cause, ssl.SSLCertVerificationError):
            why = clean(cause.verify_message).rstrip(".")
            return PostFailure(f": its certificate is refused: {why}; check it, and tls_config.ssl_ca_certs")
        case httpx.ConnectError() if isinstance(cause, ssl.SSLError):
            return PostFailure(f": TLS failed: {clean(str(cause))}; check scheme and port")
        case httpx.ConnectError() | httpx.ConnectTimeout():
            why = "is the proxy running, and reachable from here?"
            return PostFailure(f" is unreachable: {describe(error)}; {why}", may_pass=True)
        case httpx.WriteTimeout():
            return PostFailure(f" did not read the ticket within {_WRITE_TIMEOUT_S:g} s: the proxy hangs")
        case http_client.BrokenAnswerError():
            return PostFailure(" closed the connection in the middle of its answer")
        case httpx.RemoteProtocolError() if "disconnected" not in str(error):
            return PostFailure(f" does not speak HTTP ({describe(error)}): check scheme and port")
    wants = ""
    if url.lower().startswith("https:"):  # with TLS 1.3, one that refuses our certificate closes without a reason
        wants = "not trust our client" if has_certificate else "want a client"
        wants = f", or does it {wants} certificate (tls_config.ssl_certfile)"
    return PostFailure(f" closed the connection without an answer; did it restart{wants}?", may_pass=True)
