# SPDX-License-Identifier: Apache-2.0
"""What the data path tells about its work: an event for each thing that has happened.

`observe/` and `connector/metrics.py` have the listeners: metrics, Chrome traces and vLLM's spans. The data path knows
none of them: each of its four parts gets one `Observer`, which `tell_all` makes of them.

Times are in seconds of the monotonic clock. The comment above a group of events names the thread that tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from vllm_ascend_pd.core.prefill_ticket import RankKey
    from vllm_ascend_pd.core.reasons import PushFailure, ReceiveFailure
    from vllm_ascend_pd.core.step import Send
    from vllm_ascend_pd.core.ticket import Ticket
    from vllm_ascend_pd.device.event import Event


# A prefill rank. First its model's thread.


class StepBegun(NamedTuple):
    """The forward pass begins."""

    number: int
    # Empty if it completes the KV of no request.
    parts: Sequence[tuple[Ticket, Send]]


class LayerComputed(NamedTuple):
    """The KV of `layer` is in the cache once `computed` has happened."""

    layer: str
    computed: Event


class RegroupSubmitted(NamedTuple):
    """KV of `layer` is regrouped between `computed` and `ready`."""

    layer: str
    ticket_ids: Sequence[str]
    computed: Event
    ready: Event


class StepEnded(NamedTuple):
    """The forward pass has ended."""

    # If prompts end in it, it has ended once this has happened.
    computed: Event | None


# The model's thread, or the side stream's on a CPU; for a buffer, any thread.


class PushDelayed(NamedTuple):
    """A layer waited so long for a staging slot, for its buffer, or for room in a sender's queue."""

    seconds: float


# A sender's thread.


class RegroupAwaited(NamedTuple):
    """A write waited so long for the regrouping of a layer that was computed. 0 if it did not wait."""

    seconds: float


class WriteEnded(NamedTuple):
    """A write to decode rank `key` has ended. It delivered `num_bytes[i]` bytes for `ticket_ids[i]`."""

    layer: str
    key: RankKey
    begun_at: float
    ticket_ids: Sequence[str]
    num_bytes: Sequence[int]


class WriteRetried(NamedTuple):
    """A write that failed is made again for one request."""


class LayerWritten(NamedTuple):
    """All writes of a layer's KV to one decode engine are over. They took `seconds`."""

    seconds: float


# The control thread.


class WritingEnded(NamedTuple):
    """No write for `ticket` follows."""

    ticket: Ticket


class GrantAnswered(NamedTuple):
    """Decode rank `key` has answered a request for a grant, or for its renewal."""

    ticket: Ticket
    key: RankKey
    asked_at: float
    renewal: bool
    # The type of its message.
    answer: str


class OutcomeReported(NamedTuple):
    """All decode ranks have learned how the transfer ended, or cannot be reached."""

    ticket: Ticket
    # Delivered.
    num_bytes: int
    # Of these, before the prompt's last layer was computed.
    early_bytes: int
    # None if all was delivered.
    cause: PushFailure | None


# A prefill engine's scheduler.


class PushBegun(NamedTuple):
    """A request with a ticket is allocated, or its ticket is refused."""

    request_id: str
    # The request's. None if vLLM does not trace.
    trace_headers: Mapping[str, str] | None


class PushRefused(NamedTuple):
    """The request's ticket is not served. Nothing else follows for this request."""

    request_id: str
    reason: str


class PushEnded(NamedTuple):
    """All ranks are done with the request."""

    request_id: str
    ticket: Ticket
    failure: str | None


# A decode rank's control thread.


class TicketExpected(NamedTuple):
    """The scheduler has handed a ticket to this rank."""

    request_id: str
    ticket_id: str


class TicketClosed(NamedTuple):
    """Nobody can write for the ticket any more."""

    request_id: str
    ticket_id: str
    received: bool


# A decode engine's scheduler.


class PromptPlaced(NamedTuple):
    """It was decided who computes `tokens` tokens of a prompt, and why."""

    # The API server's id.
    request_id: str
    by_decode: bool
    reason: str
    tokens: int


class ThresholdSet(NamedTuple):
    """Decode computes prompts of so many tokens, beyond its cache, if nothing keeps it from that."""

    tokens: int


class TicketIssued(NamedTuple):
    """A ticket was issued for a request."""

    request_id: str
    ticket: Ticket
    # The request's. None if vLLM does not trace.
    trace_headers: Mapping[str, str] | None
    # Blocks of all cache groups that wait for its KV.
    blocks: int
    # When the intent was posted that it follows, and when prefill had computed the prompt, in monotonic seconds. None:
    # it follows none.
    computed_first: tuple[float, float] | None = None


class PostRetried(NamedTuple):
    """A ticket is posted to the metaserver again. On the metaserver client's thread."""


class KvVerified(NamedTuple):
    """Ranks have compared KV with prefill's checksums, so many `times` with this result (`Verified`)."""

    result: str
    times: int


class ReceiveFailed(NamedTuple):
    """The request's KV will not arrive. `ReceiveEnded` follows."""

    cause: ReceiveFailure


class ReceiveEnded(NamedTuple):
    """All ranks are done with the ticket: the request may run, be computed here, or end."""

    request_id: str
    ticket: Ticket
    # Since the ticket was issued.
    seconds: float
    # By all ranks.
    received_bytes: int
    # Of these, before prefill had computed the last layer.
    early_bytes: int
    # None if all KV is there.
    cause: ReceiveFailure | None = None
    # Why, as the client may read it.
    failure: str = ""


Observed: TypeAlias = (
    StepBegun
    | LayerComputed
    | RegroupSubmitted
    | StepEnded
    | PushDelayed
    | RegroupAwaited
    | WriteEnded
    | WriteRetried
    | LayerWritten
    | WritingEnded
    | GrantAnswered
    | OutcomeReported
    | PushBegun
    | PushRefused
    | PushEnded
    | TicketExpected
    | TicketClosed
    | PromptPlaced
    | ThresholdSet
    | TicketIssued
    | PostRetried
    | KvVerified
    | ReceiveFailed
    | ReceiveEnded
)


class Observer:
    """Listens to a part of the data path. This one does nothing."""

    def on(self, event: Observed) -> None:
        """Takes an event. Returns at once, and does not raise. Any thread may call it."""

    def close(self, timeout_s: float) -> None:
        """Nothing follows. Blocks for `timeout_s` at most. Whoever ends the part calls it."""


class _Listeners(Observer):
    def __init__(self, listeners: Sequence[Observer]) -> None:
        self._listeners = listeners

    def on(self, event: Observed) -> None:
        for each in self._listeners:
            each.on(event)

    def close(self, timeout_s: float) -> None:
        for each in self._listeners:
            each.close(timeout_s)


def tell_all(*listeners: Observer | None) -> Observer:
    """Returns an observer that passes everything to the listeners, in their order. Listeners may be None."""
    there = [each for each in listeners if each is not None]
    return there[0] if len(there) == 1 else _Listeners(there)


@dataclass(frozen=True)
class PrefillStatus:
    """How a prefill rank is at one moment."""

    queued_tasks: int  # layers and marks in the senders' queues
    ungranted_transfers: int  # at least one decode rank has not granted them yet
    restart_needed: bool  # the device, a regroup group or the transfer engine has failed for good
