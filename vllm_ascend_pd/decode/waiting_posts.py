# SPDX-License-Identifier: Apache-2.0
"""Extends the deadlines of posted tickets that still wait for prefill."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio

from vllm_ascend_pd.core.metaserver import MAX_ASKED
from vllm_ascend_pd.decode.metaserver_http import MetaserverHttp
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings

logger = logging.getLogger(__name__)

_URLS_AT_ONCE = 8
"""Metaservers that are asked at the same time: fewer than `metaserver_http` sends messages beside posts."""


@dataclass(eq=False)
class Post:
    """A ticket that was posted and has no answer yet. The event loop's thread owns all fields but the first three."""

    key: str
    url: str
    content: bytes
    posted_at: float
    """On the event loop's clock, which is `time.monotonic`."""
    deadline: float
    """When the post ends, on the same clock."""
    latest: float
    """The largest value that `deadline` may get."""
    extended: bool = False
    """True once the metaserver said that the ticket waits."""
    has_connection: bool = False
    """False while the post waits for a connection of this engine: the metaserver does not have the ticket yet."""
    limit: anyio.CancelScope | None = None
    """Enforces `deadline` once the post runs."""
    task: asyncio.Task[None] | None = None
    """Runs the post."""

    def extend(self, deadline: float) -> None:
        if self.limit is not None and self.limit.cancel_called:
            return  # its deadline has passed
        self.extended = True
        self.deadline = max(self.deadline, min(deadline, self.latest))
        if self.limit is not None:
            self.limit.deadline = self.deadline

    @property
    def is_at_its_longest(self) -> bool:
        """Whether the deadline cannot be extended any more."""
        return self.extended and self.deadline >= self.latest


class WaitingPosts:
    """Asks about posts without an answer, and extends their deadlines. The thread of one event loop owns it."""

    def __init__(self, settings: MetaserverSettings, http: MetaserverHttp, posts: Callable[[], Iterable[Post]]) -> None:
        """`posts` returns the posts without an outcome."""
        self._deadline_s = settings.deadline_s
        self._every_s = min(settings.ask_every_s, settings.deadline_s / 4)
        self._http = http
        self._posts = posts
        self._asked: set[str] = set()  # URLs
        self._free = asyncio.Semaphore(_URLS_AT_ONCE)

    async def run(self) -> None:
        """Runs until it is cancelled. Sends at most one question per URL at a time."""
        async with anyio.create_task_group() as tasks:
            while True:
                await asyncio.sleep(self._every_s)
                old = asyncio.get_running_loop().time() - self._every_s
                for url in {post.url for post in self._posts() if post.posted_at <= old} - self._asked:
                    self._asked.add(url)
                    tasks.start_soon(self._ask, url)

    async def _ask(self, url: str) -> None:
        try:
            async with self._free:
                await self._ask_about(url)
        except Exception:
            logger.exception("metaserver %s cannot be asked which tickets wait: their deadlines are not extended", url)
        finally:
            self._asked.discard(url)

    async def _ask_about(self, url: str) -> None:
        posts = {post.key: post for post in self._posts() if post.url == url}
        named = [key for key, post in posts.items() if post.has_connection]
        for first in range(0, max(1, len(named)), MAX_ASKED):
            some = named[first : first + MAX_ASKED]
            asked_at = asyncio.get_running_loop().time()
            waiting = await self._http.still_waiting(url, some)
            if waiting is None:
                return
            for key in waiting.intersection(some):
                posts[key].extend(asked_at + self._deadline_s)
            if not first:  # the metaserver works, so posts that wait for a connection will get one
                for post in posts.values():
                    if not post.has_connection:
                        post.extend(asked_at + self._deadline_s)
