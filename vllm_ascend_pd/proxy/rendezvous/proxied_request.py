# SPDX-License-Identifier: Apache-2.0
"""One client request from its arrival to its end, over all attempts at decode and prefill engines."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from starlette.responses import Response

from vllm_ascend_pd.proxy.http.bodies import ClientRequest
from vllm_ascend_pd.proxy.rendezvous.decode_attempt import DecodeAttempt, TicketProgress
from vllm_ascend_pd.proxy.rendezvous.observer import Span
from vllm_ascend_pd.proxy.routing.answers import RULES, Counts, EngineRole, Failure
from vllm_ascend_pd.proxy.routing.concurrency import RequestGroup


class ProxiedRequest:
    """One client request. All its work runs under `scope`, and only `end` cuts that short.

    The task that serves the client changes it, and so do the metaserver's modules, by the methods below.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self.request: ClientRequest | None = None
        """The parsed body. None until it has arrived, and for requests that need no prefill: no ticket matches them."""
        self.request_id = ""
        """The id of the last attempt. `RequestTable.attempt` sets it."""
        self.scope = anyio.CancelScope()
        """Cancelled by `end`."""
        self.final_response: Response | None = None
        """What the client gets instead of a decode engine's response."""
        self.failed_prefill: set[str] = set()
        """URLs of prefill engines that failed for this request."""
        self.prefills = RequestGroup()
        """All its prefills, of all attempts. They share one place in the queue."""
        self._prefill_failures: dict[int, list[Failure]] = {}
        """Why prefills failed under earlier attempts, by the number of the prompt."""
        self._ended = False
        """Whether `end` or `close` was called. Later responses are ignored."""

    def prefill_failures(self, prompt: int) -> Sequence[Failure]:
        """Why prefills of a prompt failed under earlier attempts."""
        return self._prefill_failures.get(prompt, ())

    def prefill_failed(self, progress: TicketProgress, failure: Failure) -> None:
        """Records a failed prefill of a ticket."""
        progress.failures.append(failure)
        if RULES[EngineRole.PREFILL, failure.kind].counts is Counts.YES:
            self.failed_prefill.add(failure.url)

    def begin_anew(self, attempt: DecodeAttempt, prompt: int, progress: TicketProgress) -> None:
        """Gives an attempt up because KV did not come. The next attempt inherits the ticket's failures."""
        self.inherit(prompt, progress)
        attempt.end()

    def inherit(self, prompt: int, progress: TicketProgress) -> None:
        """Passes a ticket's failures on to the tickets of later attempts."""
        self._prefill_failures[prompt] = max(self._prefill_failures.get(prompt, []), progress.failures, key=len)

    def end(self, response: Response | None) -> None:
        """Stops all work for this request. Only the first call counts.

        `response`: for the client; None if the client has left.
        """
        if not self._ended:
            self._ended = True
            self.final_response = response
            self.scope.cancel()

    def close(self) -> None:
        """All work has ended: later calls of `end` change nothing."""
        self._ended = True
