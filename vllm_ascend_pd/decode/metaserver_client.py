# SPDX-License-Identifier: Apache-2.0
"""Posts tickets from the decode engine's scheduler to the metaserver, without ever blocking the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass

import anyio
import msgspec

from vllm_ascend_pd.core.http_pool import IDLE_CONNECTION_S
from vllm_ascend_pd.core.metaserver import TransferFailure
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.decode.metaserver_http import FinalError, MetaserverHttp, RetryableError, clean, no_answer
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.waiting_posts import Post, WaitingPosts
from vllm_ascend_pd.transport.secret_files import SecretFileError

logger = logging.getLogger(__name__)


class MetaserverError(Exception):
    """The client could not be started or stopped."""


@dataclass(frozen=True)
class PostOutcome:
    """How the post of `key` ended. `reason` is one line: what, where, what to do; empty when `ok`."""

    key: str
    ok: bool
    reason: str = ""


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
        self._posts: dict[str, Post] = {}
        self._outcomes: deque[PostOutcome] = deque()
        self._telling = 0
        self.retried = 0  # posts that were made again so far
        self._closed = False
        try:
            self._http = MetaserverHttp(settings)
        except (OSError, SecretFileError) as error:  # ssl.SSLError is an OSError
            raise MetaserverError(f"a certificate or token of the metaserver cannot be read: {error}") from error
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._free = asyncio.Semaphore(settings.max_connections)
        self._tasks: set[asyncio.Task[None]] = set()
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
                reason = f"metaserver URL {clean(url)!r} refused: {refused}"
            elif self._closed:
                reason = f"not posted to metaserver {url}: the engine is shutting down"
            elif len(self._posts) >= self._settings.max_pending:
                reason = (
                    f"not posted to metaserver {url}: {len(self._posts)} posts wait already; "
                    "prefill does not keep up or the proxy hangs"
                )
            else:
                now, settings = time.monotonic(), self._settings
                latest = now + max(settings.deadline_s, settings.longest_s)
                post = Post(key, url, content, now, now + settings.deadline_s, latest)
                self._posts[key] = post
                self._loop.call_soon_threadsafe(self._begin, post)
                return
        self._outcomes.append(PostOutcome(key, ok=False, reason=reason))

    def cancel(self, key: str) -> None:
        """Give up the post of `key`, if one is under way: it gets no outcome and `key` is free again.

        If it has ended already, `poll` still returns its outcome.
        """
        with self._lock:
            post = self._posts.pop(key, None)
            if post is not None and not self._closed:
                self._loop.call_soon_threadsafe(_abandon, post)

    def tell_failure(self, url: str, failure: TransferFailure) -> None:
        """Tell the metaserver at `url`, where the ticket was posted, without an outcome: one that does not
        hear it notices less soon, or less of the reason. Nothing is told beyond `max_pending` messages at a time."""
        if self.check(url) is not None:
            return
        with self._lock:
            if self._closed or self._telling >= self._settings.max_pending:
                return
            self._telling += 1
            self._loop.call_soon_threadsafe(self._begin_to_tell, url, failure)

    def poll(self) -> list[PostOutcome]:
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
        self._start(WaitingPosts(self._settings, self._http, self._snapshot).run())
        try:
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), IDLE_CONNECTION_S)
                await self._http.close_unused()
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.close()
            await self._loop.shutdown_default_executor()  # name resolution runs there

    def _snapshot(self) -> list[Post]:
        with self._lock:
            return list(self._posts.values())

    def _begin(self, post: Post) -> None:
        self._start(self._end(post))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)

    async def _end(self, post: Post) -> None:
        """Run `post` to its outcome."""
        with self._lock:
            if self._posts.get(post.key) is not post:
                return  # cancelled before it has begun
        reason = ""
        try:
            accepted = False
            with anyio.CancelScope() as post.scope, anyio.CancelScope(deadline=post.deadline) as post.limit:
                await self._in_turn(post)
                accepted = True
            if not accepted:
                reason = self._why_timed_out(post)
        except FinalError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - becomes the outcome
            reason = f"post to metaserver {post.url} failed: {type(error).__name__}: {clean(str(error))}"
        with self._lock:
            if self._posts.get(post.key) is post:
                del self._posts[post.key]
                self._outcomes.append(PostOutcome(post.key, ok=not reason, reason=reason))

    def _begin_to_tell(self, url: str, failure: TransferFailure) -> None:
        self._start(self._tell(url, failure))

    async def _tell(self, url: str, failure: TransferFailure) -> None:
        try:
            problem = await self._http.tell(url, failure)
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

    def _why_timed_out(self, post: Post) -> str:
        if post.is_at_its_longest:
            seconds = post.latest - post.posted_at
            return (
                f"metaserver {post.url} did not answer within {seconds:g} s, though it said that the ticket waits for "
                "prefill (queue_timeout_s, transfer_timeout_s): more prefill engines are needed"
            )
        if not post.has_connection:
            return (
                f"not posted to metaserver {post.url} within {self._settings.deadline_s:g} s: "
                f"all {self._settings.max_connections} connections wait for answers (metaserver_max_connections)"
            )
        return no_answer(post.url, self._settings.deadline_s)

    async def _in_turn(self, post: Post) -> None:
        async with self._free:
            post.has_connection = True
            await self._attempts(post)

    async def _attempts(self, post: Post) -> None:
        """Post until answered. Raises `FinalError` when it failed or there are no attempts left."""
        settings = self._settings
        for attempt in range(settings.retries + 1):
            try:
                return await self._http.post(post.url, post.content)
            except RetryableError as error:
                failure = error
            if attempt < settings.retries:
                self.retried += 1
                ceiling = min(settings.backoff_max_s, settings.backoff_base_s * 2**attempt)
                await asyncio.sleep(random.uniform(ceiling / 2, ceiling))
        raise FinalError(f"metaserver {post.url} {failure} ({settings.retries + 1} attempts)")


def _abandon(post: Post) -> None:
    """On the loop. A post without a scope has not begun, and will not."""
    if post.scope is not None:
        post.scope.cancel()
