# SPDX-License-Identifier: Apache-2.0
"""The thread with an event loop that sends tickets and failure reports to metaservers."""

from __future__ import annotations

import asyncio
import logging
import random
import threading

import anyio

from vllm_ascend_pd.core.metaserver import TransferFailure
from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.decode.metaserver_http import FinalError, MetaserverHttp, RetryableError, clean, no_answer
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.pending_posts import PendingPosts
from vllm_ascend_pd.decode.waiting_posts import Post, WaitingPosts
from vllm_ascend_pd.transport.event_loop_thread import EventLoopThread

logger = logging.getLogger(__name__)


class PostLoop:
    """Any thread may call the public methods. None of them waits for the network, except `close`.

    The private methods run on the loop's own thread, which owns all that has no lock."""

    def __init__(
        self,
        settings: MetaserverSettings,
        http: MetaserverHttp,
        pending: PendingPosts,
        observer: DecodeSchedulerObserver,
    ) -> None:
        """Starts the thread."""
        self._settings = settings
        self._http = http
        self._pending = pending
        self._lock = threading.Lock()
        self._reports = 0
        """Failure reports on their way; under the lock."""
        self._observer = observer
        self._connections = asyncio.Semaphore(settings.max_connections)
        """For posts."""
        self._thread = EventLoopThread("metaserver-client", http.close)
        self.loop = self._thread.loop
        waiting = WaitingPosts(settings, http, pending.snapshot)
        self._thread.call(self._thread.start, waiting.run)

    def submit(self, post: Post) -> None:
        """Runs `post` to its outcome in `pending`, unless it is removed from there first."""
        self._thread.call(self._begin, post)

    def cancel(self, post: Post) -> None:
        """Ends `post`, which has been removed from `pending`, and closes its connection."""
        self._thread.call(_cancel, post)

    def report(self, url: str, failure: TransferFailure) -> None:
        """Reports a failed transfer. Beyond `max_pending` reports on their way, a further one is dropped."""
        with self._lock:
            if self._reports >= self._settings.max_pending:
                return
            self._reports += 1
        self._thread.call(self._thread.start, self._report, url, failure)

    def close(self, timeout_s: float) -> bool:
        """Cancels all work, closes all connections and ends the thread. Returns False if that takes longer."""
        return self._thread.close(timeout_s)

    def _begin(self, post: Post) -> None:
        if self._pending.has(post):
            post.task = self._thread.start(self._post, post)

    async def _post(self, post: Post) -> None:
        reason = ""
        try:
            with anyio.CancelScope(deadline=post.deadline) as post.limit:
                async with self._connections:
                    post.has_connection = True
                    await self._attempts(post)
            if post.limit.cancelled_caught:
                reason = self._why_timed_out(post)
        except FinalError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - becomes the outcome
            reason = f"post to metaserver {post.url} failed: {type(error).__name__}: {clean(str(error))}"
        self._pending.end(post, reason)

    async def _attempts(self, post: Post) -> None:
        """Posts until the metaserver accepts. Raises `FinalError` if it refuses, or after the last attempt."""
        settings = self._settings
        for attempt in range(settings.retries + 1):
            try:
                return await self._http.post(post.url, post.content)
            except RetryableError as error:
                failure = error
            if attempt < settings.retries:
                self._observer.post_retried()
                ceiling = min(settings.backoff_max_s, settings.backoff_base_s * 2**attempt)
                await asyncio.sleep(random.uniform(ceiling / 2, ceiling))
        raise FinalError(f"metaserver {post.url} {failure} ({settings.retries + 1} attempts)")

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

    async def _report(self, url: str, failure: TransferFailure) -> None:
        try:
            problem = await self._http.report(url, failure)
        finally:
            with self._lock:
                self._reports -= 1
        if problem is not None:
            logger.warning(
                "request %s: its failed transfer cannot be reported to metaserver %s: %s; the client may get no reason",
                failure.request_id,
                url,
                problem,
            )


def _cancel(post: Post) -> None:
    if post.task is not None:  # otherwise it has not begun, and never does: it is not pending
        post.task.cancel()
