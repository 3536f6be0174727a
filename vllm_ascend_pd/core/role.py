# SPDX-License-Identifier: Apache-2.0
"""What vLLM's hooks (`connector/connector.py`) ask of an engine's scheduler and of its ranks.

vLLM calls every hook on every connector. So each method here does nothing, and the scheduler and the worker of each
side override those that concern them. docs/structure.md lists the main hooks in the order in which vLLM calls them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.core.engine_view import ScheduledRequest
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, WorkerReport


@dataclass(frozen=True)
class TransferResults:
    """Ids of requests whose transfers have ended on this rank since the last call."""

    # Sent: vLLM may free their blocks.
    sent: set[str] = field(default_factory=set)
    # Received or failed: vLLM may use or free their blocks.
    received: set[str] = field(default_factory=set)
    # Those of `received` that have failed, if vLLM learns of failures by request.
    failed: set[str] = field(default_factory=set)


class ConnectorRole:
    """A role that does nothing.

    A worker has it until its caches are registered, and every process has it after shutdown.
    """

    # In a worker, on the model's thread, but for `await_buffer`.

    def handshake(self) -> tuple[bytes, dict[str, str]] | None:
        """Returns what the engine's scheduler is told of this rank when the engine starts: the rank's encoded
        description, and the engine's settings."""
        return None

    def sleep(self) -> None:
        """Ends all transfers and unregisters memory. A second call does nothing."""

    def wake(self) -> None:
        """Registers memory again. Does nothing unless the role sleeps."""

    def preempted(self, step: Any) -> None:
        """Waits until nothing reads the blocks of the step's preempted requests, which are about to be reused."""

    def start_step(self, step: Any) -> None:
        """Begins a step. `step`: a PrefillStep or a DecodeStep, by the engine's side."""

    def await_buffer(self, layer: str | int) -> None:
        """Waits until a layer's buffer may be overwritten. `layer`: its name, or its number on this rank. Any thread
        calls it."""

    def mark_cached(self, layer: str) -> None:
        """The cache has the KV of the layer that `push_layer` names next, whose attention comes later.

        `layer`: its name; "" if that is not known.
        """

    def push_layer(self, layer: str) -> None:
        """The device has computed the layer once it has run what is queued now. `layer`: its name."""

    def end_forward(self, error: BaseException | None = None) -> None:
        """The forward pass has ended, and `error` is why it failed."""

    def end_step(self) -> None:
        """All layers have been computed, or an error has ended the forward pass."""

    def take_results(self) -> TransferResults:
        """Returns the transfers that have ended. May wait as long as the step says."""
        return TransferResults()

    def take_lost_blocks(self) -> set[int]:
        """Returns blocks of requests that have just failed, if vLLM learns of failures by blocks."""
        return set()

    def take_report(self) -> WorkerReport | None:
        """Returns what the scheduler is told after this step."""
        return None

    @property
    def failure(self) -> str | None:
        """Why this rank works no more until its engine is restarted; None if it works."""
        return None

    @property
    def exchanged_steps(self) -> int:
        """In how many steps this rank has exchanged KV with others, if there was any. Their numbers must be equal (R5).
        0: it never does."""
        return 0

    # In the scheduler, on its thread.

    def take_handshakes(self, ranks: Mapping[tuple[int, int], Any]) -> None:
        """Takes the ranks' descriptions of themselves, by (pipeline stage, rank): when they have started, and whenever
        the engine has been woken."""

    def bind_block_pool(self, pool: Any) -> None:
        """Takes vLLM's block pool."""

    def add_request(self, request: ScheduledRequest) -> None:
        """Takes note of a new request."""

    def matched_tokens(self, request: ScheduledRequest, num_computed_tokens: int) -> int | None:
        """Returns how many of the request's tokens a transfer will deliver. Called right before allocation.

        None: the request must not be scheduled in this step.
        """
        return 0

    def allocated(self, request: ScheduledRequest, blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Takes the blocks that a request was allocated, per cache group.

        `num_external_tokens`: for how many of its tokens a transfer delivers the KV. When that is there, the request
        starts, and vLLM calls this once more.
        """

    def build_step(self, output: Any) -> PrefillStep | DecodeStep:
        """Returns the step for the ranks that belongs to vLLM's step `output`."""
        raise NotImplementedError

    def loads_failed(self, blocks: Collection[int]) -> None:
        """Takes blocks into which a connector, this one or another, has failed to load KV. Called after each step."""

    def update(self, report: WorkerReport | None, ended: set[str]) -> None:
        """Takes the ranks' report, and requests that all ranks have reported: on prefill as sent, on decode as received
        or failed."""

    def steps_lost(self) -> None:
        """Steps were lost, and vLLM has ended all requests. The ranks may not have heard what these steps told them,
        nor the scheduler what the ranks reported. Call it when no step is on its way."""

    def end_request(self, request: ScheduledRequest) -> tuple[bool, dict[str, Any] | None]:
        """Takes note of a request's end. Returns whether its blocks must be kept, and what its response says."""
        return False, None

    @property
    def has_pending_pushes(self) -> bool:
        """Whether a request has ended whose blocks the ranks may still read."""
        return False
