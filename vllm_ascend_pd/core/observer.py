# SPDX-License-Identifier: Apache-2.0
"""What the data path tells about its work: one observer for each of its four parts.

The methods of these classes do nothing. `observe/` and `connector/metrics.py` have the listeners: metrics, Chrome
traces and vLLM's spans. The data path knows none of them: it gets one observer, which `tell_all` makes.

Methods return at once, do not raise, and get times in seconds of the monotonic clock. The comment above a group of
methods names the thread that calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm_ascend_pd.core.plan import Offsets
    from vllm_ascend_pd.core.prefill_ticket import RankKey
    from vllm_ascend_pd.core.reasons import PushFailure, ReceiveFailure
    from vllm_ascend_pd.core.step import Send
    from vllm_ascend_pd.core.ticket import Ticket
    from vllm_ascend_pd.device.base import Event


_Observer = TypeVar("_Observer")


@dataclass(frozen=True)
class PrefillStatus:
    """How a prefill rank is at one moment."""

    queued_layers: int  # computed, not yet written
    ungranted_transfers: int  # at least one decode rank has not granted them yet
    restart_needed: bool  # the device, a regroup group or the transfer engine has failed for good


class PrefillObserver:
    """Observes a prefill rank."""

    # The model's thread.

    def step_began(self, number: int, parts: Sequence[tuple[Ticket, Send]]) -> None:
        """The forward pass begins. `parts` is empty if it completes the KV of no request."""

    def layer_computed(self, layer: str, computed: Event) -> None:
        """The KV of `layer` is in the cache once `computed` has happened."""

    def regroup_submitted(self, layer: str, ticket_ids: Sequence[str], computed: Event, ready: Event) -> None:
        """KV of `layer` is regrouped between `computed` and `ready`."""

    def step_ended(self, computed: Event | None) -> None:
        """The forward pass has ended. If prompts end in it, it has ended once `computed` has happened."""

    # The model's thread, or the side stream's on a CPU.

    def backpressure(self, seconds: float) -> None:
        """A layer waited so long for a staging slot, or for room in a sender's queue."""

    # A sender's thread.

    def regroup_waited(self, seconds: float) -> None:
        """A write waited so long for the regrouping of a layer that was computed. 0 if it did not wait."""

    def write_ended(
        self, layer: str, key: RankKey, begun_at: float, ticket_ids: Sequence[str], num_bytes: Offsets, total: int
    ) -> None:
        """A write to decode rank `key` has ended. It delivered `num_bytes[i]` bytes for `ticket_ids[i]`, `total` in
        all."""

    def write_retried(self) -> None:
        """A write that failed is made again for one request."""

    def layer_written(self, seconds: float) -> None:
        """All writes of a layer's KV to one decode engine are over. They took `seconds`."""

    # The control thread.

    def transfer_ended(self, ticket: Ticket, num_bytes: int, early_bytes: int, cause: PushFailure | None) -> None:
        """No write for `ticket` follows. `num_bytes` were delivered, `early_bytes` of them before the prompt's last
        layer was computed. `cause` is None if all was delivered."""

    def grant_answered(self, ticket: Ticket, key: RankKey, asked_at: float, renewal: bool, answer: str) -> None:
        """Decode rank `key` has answered a request for a grant. `answer` is the type of its message."""

    def transfer_reported(self, ticket: Ticket) -> None:
        """All decode ranks have learned how the transfer ended, or cannot be reached."""

    # Whoever ends the worker.

    def close(self, timeout_s: float) -> None:
        """Nothing follows. Blocks for `timeout_s` at most."""


class PrefillSchedulerObserver:
    """Observes the scheduler's side of a prefill engine, on its thread."""

    def transfer_began(self, request_id: str, trace_headers: Mapping[str, str] | None) -> None:
        """A request with a ticket is allocated. `trace_headers` are the request's, None if vLLM does not trace."""

    def ticket_refused(self, request_id: str, reason: str) -> None:
        """The request's ticket is not served. Nothing else follows for this request."""

    def transfer_ended(self, request_id: str, ticket: Ticket, failure: str | None) -> None:
        """All ranks are done with the request."""


class DecodeObserver:
    """Observes a decode rank. The control thread calls all methods but `close`, which is called when it has ended."""

    def ticket_received(self, request_id: str, ticket_id: str) -> None:
        """The scheduler has handed a ticket to this rank."""

    def ticket_ended(self, request_id: str, ticket_id: str, received: bool) -> None:
        """Nobody can write for the ticket any more."""

    def close(self, timeout_s: float) -> None:
        """Nothing follows. Blocks for `timeout_s` at most."""


class DecodeSchedulerObserver:
    """Observes the scheduler's side of a decode engine, on its thread unless a method says otherwise."""

    def prompt_placed(self, request_id: str, by_decode: bool, reason: str, tokens: int) -> None:
        """It was decided who computes `tokens` tokens of a prompt, and why. `request_id`: the API server's id."""

    def threshold_set(self, tokens: int) -> None:
        """Decode computes prompts of so many tokens, beyond its cache, if nothing keeps it from that."""

    def ticket_issued(self, request_id: str, ticket: Ticket, trace_headers: Mapping[str, str] | None) -> None:
        """`trace_headers` are the request's, None if vLLM does not trace."""

    def post_retried(self) -> None:
        """A ticket is posted to the metaserver again. On the metaserver client's thread."""

    def verified(self, result: str, count: int) -> None:
        """Ranks have compared KV with prefill's checksums, `count` times with this result (`Verified`)."""

    def transfer_failed(self, cause: ReceiveFailure) -> None:
        """The request's KV will not arrive. `transfer_ended` follows."""

    def transfer_ended(self, request_id: str, ending: ReceiveEnding) -> None:
        """All ranks are done with the ticket: the request may run, be computed here, or end."""

    def close(self, timeout_s: float) -> None:
        """Nothing follows. Blocks for `timeout_s` at most."""


@dataclass(frozen=True)
class ReceiveEnding:
    """How a transfer to a decode engine ended."""

    ticket: Ticket
    seconds: float  # since the ticket was issued
    received_bytes: int  # by all ranks
    early_bytes: int  # of these, before prefill had computed the last layer
    cause: ReceiveFailure | None = None  # None if all KV is there
    failure: str = ""  # why, as the client may read it


def tell_all(interface: type[_Observer], *listeners: _Observer | None) -> _Observer:
    """Returns an observer that passes everything to the listeners, in their order. Listeners may be None.

    If one listener overrides a method, the result has that listener's own method. If none does, the method does
    nothing. So observing costs no more than what listens.
    """
    observer = interface()
    for name, default in vars(interface).items():
        if name.startswith("_"):
            continue
        heard = [getattr(each, name) for each in listeners if each and getattr(type(each), name) is not default]
        if len(heard) == 1:
            setattr(observer, name, heard[0])
        elif heard:
            setattr(observer, name, _one_after_the_other(heard))
    return observer


def _one_after_the_other(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: Any) -> None:
        for call in calls:
            call(*args)

    return tell
