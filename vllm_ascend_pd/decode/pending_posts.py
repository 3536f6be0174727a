# SPDX-License-Identifier: Apache-2.0
"""Keeps posts without an outcome, and outcomes that the scheduler has not read yet."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from vllm_ascend_pd.decode.waiting_posts import Post


@dataclass(frozen=True)
class PostOutcome:
    """How the post of `key` ended."""

    key: str
    ok: bool
    """Whether the metaserver accepted the ticket and prefill succeeded."""
    reason: str = ""
    """One line: what failed, where, and what to do. Empty if `ok`."""


class PendingPosts:
    """Posts and outcomes. Any thread may call it: the scheduler adds and removes posts, the event loop's thread ends
    them.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: posts without an outcome."""
        self._limit = limit
        self._lock = threading.Lock()
        self._posts: dict[str, Post] = {}
        """By key; under the lock."""
        self._closed = False
        """Under the lock."""
        self._outcomes: deque[PostOutcome] = deque()
        """Its own operations are atomic."""

    def add(self, post: Post) -> str | None:
        """Returns why the post is not accepted, or None. Raises ValueError if its key has a post already."""
        with self._lock:
            if post.key in self._posts:
                raise ValueError(f"a post for {post.key!r} is under way")
            if self._closed:
                return "the engine is shutting down"
            if len(self._posts) >= self._limit:
                return f"{len(self._posts)} posts wait already; prefill does not keep up or the proxy hangs"
            self._posts[post.key] = post
            return None

    def remove(self, key: str) -> Post | None:
        """Removes a post without an outcome."""
        with self._lock:
            return self._posts.pop(key, None)

    def has(self, post: Post) -> bool:
        with self._lock:
            return self._posts.get(post.key) is post

    def end(self, post: Post, reason: str) -> None:
        """Adds the outcome, unless the post was removed meanwhile. An empty `reason` means success."""
        with self._lock:
            if self._posts.get(post.key) is post:
                del self._posts[post.key]
                self._outcomes.append(PostOutcome(post.key, ok=not reason, reason=reason))

    def refuse(self, key: str, reason: str) -> None:
        """Adds the outcome of a post that was never accepted."""
        self._outcomes.append(PostOutcome(key, ok=False, reason=reason))

    def take_outcomes(self) -> list[PostOutcome]:
        """Returns the outcomes since the last call, in the order in which posts ended."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def snapshot(self) -> list[Post]:
        with self._lock:
            return list(self._posts.values())

    def close(self) -> None:
        """Removes all posts and accepts no more."""
        with self._lock:
            self._closed = True
            self._posts.clear()
