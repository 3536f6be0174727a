# SPDX-License-Identifier: Apache-2.0
"""Judges prefill engines: once for each ticket, when its prefill has failed or its transfer is over. No I/O.

A ticket that a client may have made up says nothing about an engine, whatever becomes of it.
"""

from __future__ import annotations

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import DecodeAttempt, TicketProgress
from vllm_ascend_pd.proxy.routing.answers import RULES, Counts, EngineRole, Failure, FailureKind
from vllm_ascend_pd.proxy.routing.deliveries import Deliveries
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool


class PrefillJudge:
    """The event loop's thread owns it."""

    def __init__(self, pool: EnginePool, deliveries: Deliveries, observer: ProxyObserver) -> None:
        """`pool`: the prefill engines."""
        self._pool = pool
        self._deliveries = deliveries
        self._observer = observer

    @owned
    def failed(self, ticket: TicketProgress, failure: Failure) -> None:
        """A ticket's prefill has failed, or its KV has not arrived."""
        if ticket.is_judged:
            return
        ticket.is_judged = True
        attempt = ticket.attempt
        self._observer.attempt_failed(EngineRole.PREFILL, failure, attempt.request_id)
        if not ticket.is_evidence:
            return
        self._pool.judge(ticket.engine, failure.kind)
        if RULES[EngineRole.PREFILL, failure.kind].counts is Counts.IF_OTHERS_DELIVER:
            self._deliveries.failed(ticket.engine, attempt.engine, failure.for_all)

    @owned
    def answered(self, attempt: DecodeAttempt, is_complete: bool) -> None:
        """Decode has answered the client, so KV has arrived. `is_complete`: False if that is the first part only."""
        if not attempt.tickets or not (is_complete or attempt.has_one_sequence):
            return
        for ticket in attempt.tickets.values():
            if ticket.engine and ticket.is_evidence and not (ticket.is_judged or ticket.given_up):
                ticket.is_judged = True
                self._deliveries.delivered(ticket.engine, attempt.engine, ticket.posted_at)
                self._count_refusals(ticket)

    def _count_refusals(self, ticket: TicketProgress) -> None:
        """Counts other engines' refusals of the prompt's earlier tickets: this ticket's engine has taken it."""
        counted = ticket.attempt.proxied.counted_refusals
        for failure in ticket.failures:
            if failure.kind is not FailureKind.TICKET or failure.url in {ticket.engine, *counted}:
                continue
            counted.add(failure.url)
            if (engine := self._pool.engines.get(failure.url)) is not None:
                self._pool.refused_what_others_took(engine, failure.kind.value)
