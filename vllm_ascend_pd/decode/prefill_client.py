# SPDX-License-Identifier: Apache-2.0
"""Hands tickets to prefill engines that hold their prompts, without ever blocking the scheduler."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.core.prompt_digest import NamesPrompt
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.delivery_loop import DeliveryLoop, DeliverySettings
from vllm_ascend_pd.decode.metaserver import PostOutcome
from vllm_ascend_pd.decode.routed_prompt import RoutedPrompt, parse_routed_prompt

logger = logging.getLogger(__name__)


class PrefillClient:
    """Any thread may call its methods. None of them waits for the network, except `close`.

    Its thread starts with the first ticket: most engines never get a request that names a prefill engine.
    """

    def __init__(self, settings: DeliverySettings, observer: DecodeSchedulerObserver | None = None) -> None:
        self._settings = settings
        self._observer = observer or DecodeSchedulerObserver()
        self._outcomes: deque[PostOutcome] = deque()  # its own operations are atomic
        self._lock = threading.Lock()
        self._open: set[str] = set()  # ids of tickets without an outcome; under the lock
        self._releases = 0  # prompts whose release was not acknowledged; under the lock
        self._closed = False  # under the lock
        self._loop: DeliveryLoop | None = None  # under the lock

    def parse(self, params: Mapping[str, Any]) -> RoutedPrompt:
        """Reads a request's `kv_transfer_params`. Raises PromptNameError if no ticket may be sent there."""
        return parse_routed_prompt(params, self._settings.hosts)

    def offer(self, ticket: Ticket, prompt: RoutedPrompt) -> None:
        """Hands `ticket` to the engine that holds `prompt`. `poll` returns the outcome, unless `end` comes first."""
        with self._lock:
            if self._closed:
                return
            if len(self._open) >= self._settings.max_pending:
                reason = f"{len(self._open)} tickets wait already (max_pending_tickets): prefill does not keep up"
                self._outcomes.append(PostOutcome(ticket.ticket_id, ok=False, reason=reason))
                return
            self._open.add(ticket.ticket_id)
            self._started().deliver(ticket, prompt)

    def end(self, ticket_id: str) -> None:
        """The ticket's outcome is not wanted any more. If it is there already, `poll` still returns it."""
        with self._lock:
            if ticket_id in self._open and self._loop is not None:
                self._loop.end(ticket_id)
            self._open.discard(ticket_id)

    def release(self, prompt: RoutedPrompt, named: NamesPrompt, reason: str) -> None:
        """Tells the engine that holds `prompt` that no ticket will come. `named`: its ticket, or what stands for one.

        Beyond `max_pending` such messages at a time a further one is dropped. Prefill gives blocks up after a time.
        """
        with self._lock:
            if self._closed or self._releases >= self._settings.max_pending:
                return
            self._releases += 1
            self._started().release(prompt, named, reason)

    def poll(self) -> list[PostOutcome]:
        """The outcomes since the last call."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all deliveries without outcomes, and the thread. A second call does no harm."""
        with self._lock:
            self._closed = True
            self._open.clear()
            loop, self._loop = self._loop, None
        if loop is not None and not loop.close(timeout_s):
            logger.warning("the thread that hands tickets to prefill did not end within %g s", timeout_s)

    def _started(self) -> DeliveryLoop:
        if self._loop is None:
            self._loop = DeliveryLoop(self._settings, self._delivered, self._released, self._observer.post_retried)
        return self._loop

    def _delivered(self, ticket_id: str, reason: str) -> None:
        with self._lock:
            if ticket_id in self._open:
                self._open.discard(ticket_id)
                self._outcomes.append(PostOutcome(ticket_id, ok=not reason, reason=reason))

    def _released(self) -> None:
        with self._lock:
            self._releases -= 1
