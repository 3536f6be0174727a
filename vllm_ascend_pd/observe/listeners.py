# SPDX-License-Identifier: Apache-2.0
"""The listeners that turn observations into metrics, and the observers made of all listeners that are on."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.failure import PushFailure, ReceiveFailure
from vllm_ascend_pd.core.observer import (
    DecodeObserver,
    DecodeSchedulerObserver,
    PrefillObserver,
    PrefillSchedulerObserver,
    PrefillStatus,
    ReceiveEnding,
)
from vllm_ascend_pd.core.plan import Offsets
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.protocol import RankDescription
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.observe import stats
from vllm_ascend_pd.observe.traces import decode_scheduler_trace, decode_trace, prefill_trace

_Observer = TypeVar("_Observer")


class PrefillStats(PrefillObserver):
    """The metrics of a prefill rank. Any thread records, one thread takes."""

    def __init__(self, rank_info: RankInfo, transport: TransportInfo) -> None:
        self._stats = stats.Stats(f"{rank_info.pp_rank}/{rank_info.rank}")
        self._stats.state(stats.TRANSPORT_INFO, msgspec.structs.astuple(transport))

    def take(self, status: Callable[[], PrefillStatus]) -> stats.Data:
        """Returns what was recorded since the last call. `status` is asked last, so a reader who sees that a transfer
        ended sees gauges without it.
        """

        def gauges() -> dict[stats.Gauge, int]:
            now = status()
            return {
                stats.PUSH_QUEUE_DEPTH: now.queued_layers,
                stats.GRANTS_WAITING: now.ungranted_transfers,
                stats.RESTART_NEEDED: int(now.restart_needed),
            }

        return self._stats.take(gauges)

    def backpressure(self, seconds: float) -> None:
        self._stats.observe(stats.BACKPRESSURE_SECONDS, seconds)

    def regroup_waited(self, seconds: float) -> None:
        self._stats.observe(stats.REGROUP_WAIT_SECONDS, seconds)

    def write_ended(
        self, layer: str, key: RankKey, begun_at: float, ticket_ids: Sequence[str], num_bytes: Offsets, total: int
    ) -> None:
        self._stats.add(stats.PUSHED_BYTES, total)

    def write_retried(self) -> None:
        self._stats.add(stats.WRITE_RETRIES)

    def layer_written(self, seconds: float) -> None:
        self._stats.observe(stats.LAYER_PUSH_SECONDS, seconds)

    def transfer_ended(self, ticket: Ticket, num_bytes: int, early_bytes: int, cause: PushFailure | None) -> None:
        if cause is not None:
            self._stats.add(stats.PUSH_FAILURES, reason=cause.value)
        elif num_bytes:
            self._stats.observe(stats.OVERLAP_RATIO, early_bytes / num_bytes)


class PrefillSchedulerStats(PrefillSchedulerObserver):
    """The metrics of a prefill engine's scheduler."""

    def __init__(self) -> None:
        self._stats = stats.Stats()
        self._held = 0

    def take(self) -> stats.Data:
        """Returns what was recorded since the last call."""
        return self._stats.take(lambda: {stats.HELD_PROMPTS: self._held})

    def prompts_held(self, count: int) -> None:
        self._held = count

    def prompt_expired(self, request_id: str) -> None:
        self._stats.add(stats.HELD_PROMPTS_EXPIRED)

    def ticket_refused(self, request_id: str, reason: str) -> None:
        self._stats.add(stats.PUSH_FAILURES, reason=PushFailure.TICKET.value)


class DecodeSchedulerStats(DecodeSchedulerObserver):
    """The metrics of a decode engine. Any thread records, one thread takes."""

    def __init__(self) -> None:
        self._stats = stats.Stats()
        self._threshold = 0

    def take(self) -> stats.Data:
        """Returns what was recorded since the last call."""
        return self._stats.take(lambda: {stats.DECODE_PROMPT_THRESHOLD: self._threshold})

    def prompt_placed(self, request_id: str, by_decode: bool, reason: str, tokens: int) -> None:
        place = f"{'decode' if by_decode else 'prefill'},{reason}"
        self._stats.add(stats.PROMPTS, reason=place)
        self._stats.add(stats.PROMPT_TOKENS, tokens, reason=place)

    def threshold_set(self, tokens: int) -> None:
        self._threshold = tokens

    def ranks_described(self, ranks: Sequence[RankDescription]) -> None:
        for rank in ranks:
            facts = msgspec.structs.astuple(rank.transport)
            self._stats.state(stats.TRANSPORT_INFO, facts, f"{rank.pp_rank}/{rank.tp_rank}")

    def post_retried(self) -> None:
        self._stats.add(stats.TICKET_POST_RETRIES)

    def transfer_failed(self, cause: ReceiveFailure) -> None:
        self._stats.add(stats.RECEIVE_FAILURES, reason=cause.value)

    def transfer_ended(self, request_id: str, ending: ReceiveEnding) -> None:
        if ending.cause is None:
            self._stats.observe(stats.TICKET_TO_READY_SECONDS, ending.seconds)


def prefill_observer(config: ConnectorConfig, rank_info: RankInfo, measured: PrefillStats) -> PrefillObserver:
    """Returns metrics, and traces if they are on. Raises TraceError if a trace cannot be written."""
    return tell_all(PrefillObserver, measured, prefill_trace(config.trace_dir, rank_info))


def decode_observer(config: ConnectorConfig, rank_info: RankInfo) -> DecodeObserver:
    """Returns traces, if they are on. Raises TraceError if they cannot be written."""
    return tell_all(DecodeObserver, decode_trace(config.trace_dir, rank_info))


def decode_scheduler_observer(
    config: ConnectorConfig, engine_id: str, *others: DecodeSchedulerObserver
) -> DecodeSchedulerObserver:
    """Returns `others`, and traces if they are on. Raises TraceError if they cannot be written."""
    return tell_all(DecodeSchedulerObserver, *others, decode_scheduler_trace(config.trace_dir, engine_id))


def tell_all(interface: type[_Observer], *listeners: _Observer | None) -> _Observer:
    """Returns an observer that passes everything to the listeners, in their order. Listeners may be None.

    If one listener overrides a method, the result has that listener's own method. If none does, the method does
    nothing. So observing costs no more than what listens.
    """
    observer = interface()
    for name in vars(interface):
        if name.startswith("_"):
            continue
        default = getattr(interface, name)
        heard = [getattr(each, name) for each in listeners if each is not None and _overrides(each, name, default)]
        if len(heard) == 1:
            setattr(observer, name, heard[0])
        elif heard:
            setattr(observer, name, _one_after_the_other(heard))
    return observer


def _overrides(listener: object, name: str, default: Any) -> bool:
    return name in vars(listener) or getattr(type(listener), name) is not default


def _one_after_the_other(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: Any) -> None:
        for call in calls:
            call(*args)

    return tell
