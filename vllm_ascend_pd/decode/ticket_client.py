# SPDX-License-Identifier: Apache-2.0
"""What the clients that send tickets have in common: a thread, a task for each ticket, and how the tickets ended."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.transport.event_loop_thread import EventLoopThread
from vllm_ascend_pd.transport.http_client import clean

MAX_PENDING = 4096
"""Tickets without an outcome, and messages without one on their way. Further tickets fail at once, further messages are
dropped."""

logger = logging.getLogger(__name__)


class NoRecipientError(ValueError):
    """Nobody may get a request's ticket: none is named or holds the prompt, or the address is refused. The text is the
    reason."""


@dataclass(frozen=True)
class PostOutcome:
    """How the ticket `key` ended."""

    key: str
    ok: bool  # prefill took the ticket, and succeeded
    reason: str = ""  # one line: what failed, where, and what to do. Empty if `ok`
    may_follow: bool = False  # the prefill failed, and one under another ticket may succeed
    held: Mapping[str, Any] | None = None  # of an intent: prefill's `kv_transfer_params`, from outside


class TicketClient:
    """Sends tickets. Any thread may call the public methods. Only `close` waits for the network. The coroutines run on
    the client's thread.
    """

    def __init__(self, name: str, wake: Callable[[], None] = lambda: None) -> None:
        """Starts the thread `name`. `wake`: is called when `poll` has a new outcome. It returns at once."""
        self._wake = wake
        self._lock = threading.Lock()
        # Tickets without an outcome, by id: what is theirs alone, and the task. Under the lock.
        self._open: dict[str, tuple[object, Future[None]]] = {}
        self._messages = 0  # on their way; under the lock
        self._outcomes: deque[PostOutcome] = deque()  # its own operations are atomic
        self._thread = EventLoopThread(name, self._end)

    def cancel(self, key: str) -> None:
        """Ends the ticket without an outcome. If it has ended already, `poll` still returns its outcome."""
        with self._lock:
            under_way = self._open.pop(key, None)
        if under_way is not None:
            under_way[1].cancel()

    def poll(self) -> list[PostOutcome]:
        """Returns the outcomes since the last call, in the order in which tickets ended."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all tickets without outcomes, the thread and all connections. A second call does no harm. Raises
        TimeoutError if that takes longer than `timeout_s`."""
        with self._lock:
            self._open.clear()
        if not self._thread.close(timeout_s):
            raise TimeoutError(f"{type(self).__name__} did not stop within {timeout_s:g} s")

    def _begin(self, key: str, work: Callable[..., Coroutine[None, None, PostOutcome]], *args: object) -> None:
        """Starts `work`, which returns the outcome of the ticket `key`."""
        mark = object()
        with self._lock:
            if key in self._open:
                raise ValueError(f"ticket {key!r} is under way")
            if len(self._open) >= MAX_PENDING:
                refused = f"{len(self._open)} tickets wait already; prefill does not keep up or the proxy hangs"
            elif (task := self._thread.start(self._run, key, mark, work, *args)) is not None:
                self._open[key] = mark, task
                return
            else:
                refused = "the engine is shutting down"
        self._outcomes.append(PostOutcome(key, False, f"the ticket was not sent: {refused}"))

    def _tell(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        """Starts `work`, which sends a message without an outcome."""
        with self._lock:
            # Counted once it has started: it cannot end before, because its end takes the lock, too.
            if self._messages < MAX_PENDING and self._thread.start(self._send_message, work, *args) is not None:
                self._messages += 1

    async def _run(
        self, key: str, mark: object, work: Callable[..., Coroutine[None, None, PostOutcome]], *args: object
    ) -> None:
        try:
            outcome = await work(*args)
        except Exception as error:
            logger.exception("a ticket cannot be sent")
            outcome = PostOutcome(key, False, f"the ticket cannot be sent: {type(error).__name__}: {clean(str(error))}")
        with self._lock:
            if self._open.get(key, (None,))[0] is not mark:  # it was cancelled, and may have begun again
                return
            del self._open[key]
            self._outcomes.append(outcome)
        self._wake()

    async def _send_message(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        try:
            await work(*args)
        finally:
            with self._lock:
                self._messages -= 1

    async def _end(self) -> None:
        """Closes connections, when no task is left."""
