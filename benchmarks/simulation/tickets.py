# SPDX-License-Identifier: Apache-2.0
"""A request's ticket: the connector's own state machines on both sides, with messages that take time.

All decode ranks of a request go through the same at the same times, so the first one stands for all, with all prefill
ranks that write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.prefill_ticket import Destination, Phase, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, GrantRequest, RankDescription, WriteReport, WriterId

from .clock import Clock
from .exchange import Exchange

_DIGEST = "0" * 32
_KEY = (0, 0)  # the decode rank
_LOOKS_EVERY_S = 1e-3  # prefill, whether anything is due; rounding must not hide that it is


class Tickets:
    """What all tickets of a cluster share. `control_s`: a message of the side channel, one way."""

    def __init__(self, clock: Clock, exchange: Exchange, config: ConnectorConfig, control_s: float, settle_s: float):
        self.clock, self.exchange, self.config = clock, exchange, config
        self.control_s, self.settle_s = control_s, settle_s
        self.description = RankDescription(0, 0, "", "", exchange.d_caches)
        self.sharding = exchange.prefill.sharding
        self.expected = lru_cache(maxsize=None)(self._expected)
        self.issued = 0

    def _expected(self, lane: int) -> frozenset[tuple[int, int]]:
        return frozenset((tensor, writer) for tensor in self.exchange.covers for writer in self.exchange.writers[lane])


class Transfer:
    """`granted()` is called when all writers may write, `ended(received, bytes, of them before prefill's end)` when
    decode knows how it ended."""

    __slots__ = ("_common", "_consumer", "_ended", "_engine", "_id", "_lane", "_producers", "_waits", "is_granted")

    def __init__(self, common: Tickets, lane: int, ended: Callable[[bool, int, int], None]) -> None:
        """Decode issues it."""
        self._common, self._lane, self._ended = common, lane, ended
        common.issued += 1
        self._id = f"{common.issued:032x}"
        config = common.config
        queue_deadline = common.clock.now + config.queue_timeout_s
        self._consumer = DecodeTicket(self._id, _DIGEST, queue_deadline, config.transfer_timeout_s, config.lease_s)
        self._producers: dict[int, PrefillTicket] = {}
        self._waits: list[Callable[[], None]] = []
        self.is_granted = False

    def open(self, engine_id: str) -> None:
        """Prefill begins to compute: its ranks ask for their grants."""
        common, self._engine = self._common, engine_id
        for rank in common.exchange.writers[self._lane]:
            state = PrefillTicket(common.clock.now + common.config.grant_timeout_s)
            state.contacted({_KEY: Destination(common.description, common.exchange.covers)})
            self._producers[rank] = state
        self._ask()

    def when_granted(self, action: Callable[[], None]) -> None:
        if self.is_granted:
            action()
        else:
            self._waits.append(action)

    def _writer(self, rank: int) -> WriterId:
        return WriterId(self._engine, 0, rank, 1)

    def _ask(self) -> None:
        """For grants, or to renew them."""
        common = self._common
        now = common.clock.now
        due = [rank for rank, state in self._producers.items() if state.due(now)]
        if due:
            for rank in due:
                self._producers[rank].asked(_KEY, now)
            common.clock.after(common.control_s, self._asked, due, now)

    def _asked(self, due: list[int], asked_at: float) -> None:
        common, consumer = self._common, self._consumer
        now = common.clock.now
        if not consumer.is_owned and consumer.state is TicketState.OPEN:
            consumer.expect(self._engine, common.sharding, common.expected(self._lane))
        answers = [
            consumer.grant(
                GrantRequest(
                    self._id,
                    _DIGEST,
                    self._writer(rank),
                    common.sharding,
                    common.exchange.covers,
                    common.settle_s,
                ),
                now,
            )
            for rank in due
        ]
        common.clock.after(common.control_s, self._answered, due, asked_at, answers)

    def _answered(self, due: list[int], asked_at: float, answers: list[Granted]) -> None:
        for rank, answer in zip(due, answers, strict=True):
            self._producers[rank].answered(_KEY, asked_at, answer)
        states = self._producers.values()
        if any(state.phase is Phase.WRITING and state.failure is None for state in states):
            pause_s = max(state.destinations[_KEY].pause_s for state in states)
            self._common.clock.after(pause_s + _LOOKS_EVERY_S, self._ask)
        if not self.is_granted and not any(state.waits_for_grant for state in states):
            self.is_granted = True  # or refused: then nothing is written, and `finish` says so
            waits, self._waits = self._waits, []
            for action in waits:
                action()

    @property
    def may_write(self) -> bool:
        now = self._common.clock.now
        return all(state.may_write(_KEY, now) for state in self._producers.values())

    def finish(self, nbytes: float, early: float) -> None:
        """Everything has been written, `nbytes` to all decode ranks, `early` of them before prefill had ended."""
        common = self._common
        now = common.clock.now
        reports = []
        share = 1 / (common.exchange.decode.tp * len(self._producers))
        for rank, state in self._producers.items():
            state.finish(now)
            state.notify(now)
            assert state.notify_pending().keys() == {_KEY}
            reports.append(
                WriteReport(
                    self._id,
                    self._writer(rank),
                    state.failure,
                    round(nbytes * share),
                    round(early * share),
                    digest=_DIGEST,
                )
            )
        common.clock.after(common.control_s, self._reported, reports)

    def _reported(self, reports: list[WriteReport]) -> None:
        common, consumer = self._common, self._consumer
        now = common.clock.now
        for report in reports:
            consumer.report(report, now)
        consumer.tick(now)
        ranks = common.exchange.decode.tp
        received = consumer.state is TicketState.RECEIVED
        self._ended(received, consumer.num_bytes * ranks, consumer.bytes_before_end * ranks)
        common.clock.after(common.control_s, self._acknowledged)

    def _acknowledged(self) -> None:
        for state in self._producers.values():
            state.acked(_KEY)
            assert state.notify_pending() == {}
            assert state.end(), state
