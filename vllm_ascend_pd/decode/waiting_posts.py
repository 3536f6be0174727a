# SPDX-License-Identifier: Apache-2.0
"""Until when a posted ticket may go without an answer.

The metaserver answers a ticket when its prefill has ended, and time in a queue for prefill does not count. So the
client asks at an interval which tickets still wait. A ticket that does gets its whole time again. No answer, or one
of a metaserver that does not know the question, changes nothing: the ticket's deadline stands.
"""

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
"""Metaservers that are asked at the same time: fewer than there are connections for messages beside posts."""


@dataclass(eq=False)
class Post:
    """A ticket on its way to an answer. All fields but the first three change on the event loop only."""

    key: str
    url: str
    content: bytes
    posted_at: float
    """On the event loop's clock, which is `time.monotonic`."""
    deadline: float
    """Ends the post, on the same clock."""
    latest: float
    """What `deadline` may become."""
    extended: bool = False
    """Whether the metaserver ever said that it waits."""
    has_connection: bool = False
    """False: it waits for one of ours, so the metaserver does not know the ticket."""
    limit: anyio.CancelScope | None = None
    """Once it has begun: what `deadline` ends."""
    scope: anyio.CancelScope | None = None
    """Once it has begun. It ends by its scope, not by `Task.cancel`: from that httpx's shields do not protect it, and
    connections that it was just closing would stay open until the garbage collector runs."""

    def extend(self, deadline: float) -> None:
        if self.limit is not None and self.limit.cancel_called:
            return  # it has ended, and is about to say so
        self.extended = True
        self.deadline = max(self.deadline, min(deadline, self.latest))
        if self.limit is not None:
            self.limit.deadline = self.deadline

    @property
    def is_at_its_longest(self) -> bool:
        """Whether nothing the metaserver says can extend it any more."""
        return self.extended and self.deadline >= self.latest


class WaitingPosts:
    """Asks about posts that have no answer, and moves their deadlines. Used on one event loop."""

    def __init__(self, settings: MetaserverSettings, http: MetaserverHttp, posts: Callable[[], Iterable[Post]]) -> None:
        """`posts`: those without an outcome."""
        self._deadline_s = settings.deadline_s
        self._every_s = min(settings.ask_every_s, settings.deadline_s / 4)
        self._http = http
        self._posts = posts
        self._asked: set[str] = set()  # URLs
        self._free = asyncio.Semaphore(_URLS_AT_ONCE)

    async def run(self) -> None:
        """Until cancelled. One question about each URL is under way at a time."""
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
            logger.exception("metaserver %s cannot be asked which tickets wait: their deadlines stand", url)
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
            if not first:  # it answers, so those that wait here will get their turn
                for post in posts.values():
                    if not post.has_connection:
                        post.extend(asked_at + self._deadline_s)
