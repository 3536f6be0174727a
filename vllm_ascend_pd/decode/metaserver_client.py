# SPDX-License-Identifier: Apache-2.0
"""Posts tickets from the decode engine's scheduler to the metaserver, without ever blocking the scheduler."""

from __future__ import annotations

import time

import msgspec

from vllm_ascend_pd.core.metaserver import TransferFailure
from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.decode.metaserver_http import MetaserverHttp, clean
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.pending_posts import PendingPosts, PostOutcome
from vllm_ascend_pd.decode.post_loop import PostLoop
from vllm_ascend_pd.decode.waiting_posts import Post
from vllm_ascend_pd.transport.keys import SecretFileError


class MetaserverError(Exception):
    """The client could not be started or stopped."""


class MetaserverClient:
    """Posts tickets to metaservers. Any thread may call its methods. Only `close` waits for the network."""

    def __init__(
        self, settings: MetaserverSettings, own_host: str, observer: DecodeSchedulerObserver | None = None
    ) -> None:
        """Raises `MetaserverError` for an allow-list entry, certificate or token that cannot be used."""
        self._settings = settings
        try:
            self._allowlist = Allowlist(settings.allowlist, own_host)
        except ValueError as error:
            raise MetaserverError(str(error)) from error
        # Where tickets may be posted to, in words.
        self.admitted = self._allowlist.admitted
        try:
            http = MetaserverHttp(settings)
        except (OSError, SecretFileError) as error:  # ssl.SSLError is an OSError
            raise MetaserverError(f"a certificate or token of the metaserver cannot be read: {error}") from error
        self._pending = PendingPosts(settings.max_pending)
        self._loop = PostLoop(settings, http, self._pending, observer or DecodeSchedulerObserver())

    def check(self, url: str) -> str | None:
        """Returns why `url` must not be posted to, or None if it may."""
        return self._allowlist.refusal(url)

    def post(self, key: str, url: str, body: dict[str, object]) -> None:
        """Sends `body` as JSON to `url`; `poll` returns the outcome. Raises ValueError if `key` has a post without an
        outcome."""
        refused = self.check(url)
        if refused is not None:
            self._pending.refuse(key, f"metaserver URL {clean(url)!r} refused: {refused}")
            return
        now, settings = time.monotonic(), self._settings
        latest = now + max(settings.deadline_s, settings.longest_s)
        post = Post(key, url, msgspec.json.encode(body), now, now + settings.deadline_s, latest)
        refused = self._pending.add(post)
        if refused is not None:
            self._pending.refuse(key, f"not posted to metaserver {url}: {refused}")
            return
        self._loop.submit(post)

    def cancel(self, key: str) -> None:
        """Ends the post of `key` without an outcome, so that `key` can be posted again.

        If the post has ended already, `poll` still returns its outcome.
        """
        post = self._pending.remove(key)
        if post is not None:
            self._loop.cancel(post)

    def report_failure(self, url: str, failure: TransferFailure) -> None:
        """Reports a failed transfer to the metaserver at `url`, where the ticket was posted. There is no outcome: a
        metaserver without the report notices the failure later, or without its reason. Beyond `max_pending` reports at
        a time, a further one is dropped."""
        if self.check(url) is None:
            self._loop.report(url, failure)

    def poll(self) -> list[PostOutcome]:
        """Returns the outcomes since the last call, in the order in which posts ended."""
        return self._pending.take_outcomes()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all posts without outcomes, the thread and all connections. A second call does no harm. Raises
        `MetaserverError` if that takes longer than `timeout_s`."""
        self._pending.close()
        if not self._loop.close(timeout_s):
            raise MetaserverError(f"the metaserver client did not stop within {timeout_s:g} s")
