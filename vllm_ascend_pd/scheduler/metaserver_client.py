# SPDX-License-Identifier: Apache-2.0
"""Posts tickets from the decode engine's scheduler to the metaserver, without ever blocking the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import httpx
import msgspec

from vllm_ascend_pd.core.metaserver import FAILURE_SUFFIX, RECOMPUTES_HEADER, TransferFailure
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.http_pool import IDLE_CONNECTION_S, close_expired
from vllm_ascend_pd.scheduler.allowlist import Allowlist
from vllm_ascend_pd.transport.secret_files import SecretFileError, read_text_secret

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 1024
_MAX_SHOWN_CHARS = 200
_FAILURE_TIMEOUT_S = 10.0
"""For telling the metaserver of a failed transfer, all in all: whoever waits for the reason has given up by then."""


class MetaserverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the metaserver. Times in seconds."""

    allowlist: tuple[str, ...] = ()
    """`scheme://host[:port][/path-prefix]`; without a port the scheme's own, without a path `/v1/metaserver`
    alone. Empty: `/v1/metaserver` on any port of this host's loopback addresses and own address."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float | None = None
    """None: as long as the deadline, since the answer is held back until prefill has ended."""
    write_timeout_s: float = 10.0
    pool_timeout_s: float = 10.0
    deadline_s: float = 300.0
    """For a whole post, from `post` to its outcome, with waiting and retries."""
    max_connections: int = 256
    """Posts under way at once; others wait."""
    max_pending: int = 4096
    """Posts without an outcome; further ones fail at once."""
    retries: int = 5
    """With the pauses below they last 1.5 to 3.1 s: a proxy that restarts is not noticed."""
    backoff_base_s: float = 0.1
    backoff_max_s: float = 2.0
    ca_file: str | None = None
    """Certificate authorities to trust instead of the system's."""
    cert_file: str | None = None
    """This engine's certificate, for mutual TLS."""
    key_file: str | None = None
    key_password: str | None = None
    token_file: str | None = None
    """Its content is sent as bearer token."""
    recomputes: bool = False
    """What the metaserver is told of `kv_load_failure_policy`: whether this engine computes what does not come."""

    def __post_init__(self) -> None:
        positive = {
            "connect_timeout_s": self.connect_timeout_s,
            "write_timeout_s": self.write_timeout_s,
            "pool_timeout_s": self.pool_timeout_s,
            "deadline_s": self.deadline_s,
            "max_connections": self.max_connections,
            "max_pending": self.max_pending,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.retries < 0 or self.backoff_base_s < 0 or self.backoff_max_s < 0:
            raise ValueError("retries, backoff_base_s and backoff_max_s must not be negative")
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file is set without cert_file")

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "key_password")
        return f"MetaserverSettings({', '.join(shown)})"


class MetaserverError(Exception):
    """The client could not be started or stopped."""


@dataclass(frozen=True)
class Outcome:
    """How the post of `key` ended. `reason` is one line: what, where, what to do; empty when `ok`."""

    key: str
    ok: bool
    reason: str = ""


@dataclass(eq=False)
class _Post:
    key: str
    url: str
    content: bytes
    deadline: float
    """On the event loop's clock, which is `time.monotonic`."""
    task: asyncio.Task[None] | None = field(default=None)


class _FinalError(Exception):
    """The post failed for good; the text is the outcome's reason."""


class _RetryableError(Exception):
    """This attempt failed, the next may not."""


class MetaserverClient:
    """One thread with one event loop and one bounded pool of connections.

    `post`, `cancel` and `poll` may be called from any thread; none of them waits for the network.
    """

    def __init__(self, settings: MetaserverSettings, own_host: str) -> None:
        """Raises `MetaserverError` for an allow-list entry, certificate or token that cannot be used."""
        self._settings = settings
        try:
            self._allowlist = Allowlist(settings.allowlist, own_host)
        except ValueError as error:
            raise MetaserverError(str(error)) from error
        self._lock = threading.Lock()
        self._posts: dict[str, _Post] = {}
        self._outcomes: deque[Outcome] = deque()
        self._telling = 0
        self.retried = 0  # posts that were made again so far
        self._closed = False
        self._transport, self._client = _http_client(settings)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._free = asyncio.Semaphore(settings.max_connections)
        self._tellers: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="metaserver-client", daemon=True)
        self._thread.start()

    def check(self, url: str) -> str | None:
        """Why `url` must not be posted to, or None when it may."""
        return self._allowlist.refusal(url)

    def post(self, key: str, url: str, body: dict[str, object]) -> None:
        """Send `body` as JSON to `url`; `poll` returns the outcome. `key` must not be under way already."""
        content = msgspec.json.encode(body)
        refused = self.check(url)
        with self._lock:
            if key in self._posts:
                raise ValueError(f"a post for {key!r} is under way")
            if refused is not None:
                reason = f"metaserver URL {_clean(url)!r} refused: {refused}"
            elif self._closed:
                reason = f"not posted to metaserver {url}: the engine is shutting down"
            elif len(self._posts) >= self._settings.max_pending:
                reason = (
                    f"not posted to metaserver {url}: {len(self._posts)} posts wait already; "
                    "prefill does not keep up or the proxy hangs"
                )
            else:
                post = _Post(key, url, content, time.monotonic() + self._settings.deadline_s)
                self._posts[key] = post
                self._loop.call_soon_threadsafe(self._begin, post)
                return
        self._outcomes.append(Outcome(key, ok=False, reason=reason))

    def cancel(self, key: str) -> None:
        """Give up the post of `key`, if one is under way: it gets no outcome and `key` is free again.

        If it has ended already, `poll` still returns its outcome.
        """
        with self._lock:
            post = self._posts.pop(key, None)
            if post is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._abandon, post)

    def tell_failure(self, url: str, failure: TransferFailure) -> None:
        """Tell the metaserver at `url`, where the ticket was posted, once and without an outcome: one that does not
        hear it notices less soon, or less of the reason. Nothing is told beyond `max_pending` messages at a time."""
        if self.check(url) is not None:
            return
        with self._lock:
            if self._closed or self._telling >= self._settings.max_pending:
                return
            self._telling += 1
            self._loop.call_soon_threadsafe(self._begin_to_tell, url, failure)

    def poll(self) -> list[Outcome]:
        """The outcomes since the last call, in the order in which posts ended."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop what is under way, without outcomes, and end thread and connections. Twice is safe."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._posts.clear()
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise MetaserverError(f"the metaserver client did not stop within {timeout_s:g} s")

    # Everything below runs on the event loop's thread.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                with contextlib.suppress(asyncio.TimeoutError):  # not TimeoutError before Python 3.11
                    await asyncio.wait_for(self._stop.wait(), IDLE_CONNECTION_S)
                await close_expired(self._transport)
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()
            await self._loop.shutdown_default_executor()  # name resolution runs there

    def _begin(self, post: _Post) -> None:
        with self._lock:
            wanted = self._posts.get(post.key) is post
        if wanted:
            post.task = self._loop.create_task(self._end(post))

    def _abandon(self, post: _Post) -> None:
        if post.task is not None:
            post.task.cancel()

    async def _end(self, post: _Post) -> None:
        """Run `post` to its outcome."""
        reason = ""
        try:
            await asyncio.wait_for(self._in_turn(post), post.deadline - self._loop.time())
        except _FinalError as error:
            reason = str(error)
        except asyncio.TimeoutError:  # not TimeoutError before Python 3.11
            reason = _no_answer(post.url, self._settings.deadline_s)
        except Exception as error:  # noqa: BLE001 - becomes the outcome
            reason = f"post to metaserver {post.url} failed: {type(error).__name__}: {_clean(str(error))}"
        with self._lock:
            if self._posts.get(post.key) is post:
                del self._posts[post.key]
                self._outcomes.append(Outcome(post.key, ok=not reason, reason=reason))

    def _begin_to_tell(self, url: str, failure: TransferFailure) -> None:
        task = self._loop.create_task(self._tell(url, failure))
        self._tellers.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tellers.discard)

    async def _tell(self, url: str, failure: TransferFailure) -> None:
        problem = None
        try:
            content = msgspec.json.encode(failure)
            posted = self._client.post(url + FAILURE_SUFFIX, content=content, timeout=_FAILURE_TIMEOUT_S)
            status = (await asyncio.wait_for(posted, _FAILURE_TIMEOUT_S)).status_code
            if status >= 500:
                problem = f"it answered {status}"
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            problem = _describe(error)
        finally:
            with self._lock:
                self._telling -= 1
        if problem is not None:
            logger.warning(
                "request %s: metaserver %s cannot be told of a failed transfer: %s: its client may not learn why",
                failure.request_id,
                url,
                problem,
            )

    async def _in_turn(self, post: _Post) -> None:
        async with self._free:
            await self._attempts(post)

    async def _attempts(self, post: _Post) -> None:
        """Post until answered. Raises `_FinalError` when it failed or there are no attempts left."""
        settings = self._settings
        for attempt in range(settings.retries + 1):
            try:
                return await self._attempt(post)
            except _RetryableError as error:
                failure = error
            if attempt < settings.retries:
                self.retried += 1
                ceiling = min(settings.backoff_max_s, settings.backoff_base_s * 2**attempt)
                await asyncio.sleep(random.uniform(ceiling / 2, ceiling))
        raise _FinalError(f"metaserver {post.url} {failure} ({settings.retries + 1} attempts)")

    async def _attempt(self, post: _Post) -> None:
        try:
            async with self._client.stream("POST", post.url, content=post.content) as response:
                body = await _read(response)
        except httpx.ReadError as error:  # a reset: the server left bytes of ours unread
            raise _RetryableError(f"closed the connection without an answer; {self._why_closed(post.url)}") from error
        except (httpx.NetworkError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            if (failure := _tls_failure(error)) is not None:
                raise _FinalError(f"metaserver {post.url}: {failure}") from error
            raise _RetryableError(
                f"is unreachable: {_describe(error)}; is the proxy running, and reachable from here?"
            ) from error
        except httpx.ReadTimeout as error:
            seconds = self._settings.read_timeout_s or self._settings.deadline_s
            raise _FinalError(_no_answer(post.url, seconds)) from error
        except httpx.RemoteProtocolError as error:
            if "disconnected without sending a response" in str(error):
                raise _RetryableError(
                    f"closed the connection without an answer; {self._why_closed(post.url)}"
                ) from error
            raise _FinalError(
                f"metaserver {post.url} does not speak HTTP ({_describe(error)}): check scheme and port"
            ) from error
        _judge(post.url, response.status_code, body)

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
        reason = _clean(cause.verify_message).rstrip(".")
        return f"its certificate is refused: {reason}; check it, and tls_config.ssl_ca_certs"
    return f"TLS failed: {_clean(str(cause))}; check scheme and port"


def _no_answer(url: str, seconds: float) -> str:
    return f"metaserver {url} did not answer within {seconds:g} s: prefill is overloaded or the proxy hangs"


def _judge(url: str, status: int, body: bytes) -> None:
    """Return when the metaserver accepted the post, raise what its answer means otherwise."""
    if 200 <= status < 300:
        return
    failure = _metaserver_error(body) if status == 502 else None
    if failure is not None:
        raise _FinalError(f"prefill failed, says metaserver {url}: {failure}")
    answer = f"answered {status}: {_clean(body.decode(errors='replace')) or '(empty)'}"
    if status >= 500:
        raise _RetryableError(f"{answer}; see the proxy's log")
    if status < 400:
        raise _FinalError(f"metaserver {url} {answer}: redirects are not followed, give the final URL")
    raise _FinalError(
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
    return _clean(error if isinstance(error, str) else msgspec.json.encode(error).decode())


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
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            # A function: without one, a key that has a password would ask for it on the terminal.
            context.load_cert_chain(settings.cert_file, settings.key_file, lambda: settings.key_password or "")
        if settings.token_file is not None:
            headers["Authorization"] = f"Bearer {read_text_secret(settings.token_file)}"
    except (OSError, SecretFileError) as error:  # ssl.SSLError is an OSError
        raise MetaserverError(f"a certificate or token of the metaserver cannot be read: {error}") from error
    transport = httpx.AsyncHTTPTransport(
        verify=context,
        limits=httpx.Limits(max_connections=settings.max_connections, keepalive_expiry=IDLE_CONNECTION_S),
        trust_env=False,
    )
    client = httpx.AsyncClient(
        transport=transport,
        headers=headers,
        timeout=httpx.Timeout(
            connect=settings.connect_timeout_s,
            read=settings.read_timeout_s or settings.deadline_s,
            write=settings.write_timeout_s,
            pool=settings.pool_timeout_s,
        ),
        follow_redirects=False,
        trust_env=False,  # no HTTP_PROXY: what the allow-list admits is reached directly
    )
    return transport, client


def _describe(error: Exception) -> str:
    return _clean(str(error)) or type(error).__name__


def _clean(text: str) -> str:
    """Text from outside as one short printable line."""
    return one_line(text, _MAX_SHOWN_CHARS)
