# SPDX-License-Identifier: Apache-2.0
"""The interface between the facade (`connector.py`) and the four roles (`roles/`).

A role is a side of the transfer (prefill, decode) in one kind of process (scheduler, worker). vLLM calls every hook on
every connector, so each method here does nothing, and a role overrides those that concern it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, WorkerReport
from vllm_ascend_pd.observe.stats import Data

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for each thing that a role closes."""


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

    # In a worker, on the model's thread.

    def handshake(self) -> "KVConnectorHandshakeMetadata | None":
        """Returns what the engine's scheduler is told of this rank when the engine starts."""
        return None

    def preempted(self, step: Any) -> None:
        """Waits until nothing reads the blocks of the step's preempted requests, which are about to be reused."""

    def start_step(self, step: Any) -> None:
        """Begins a step. `step`: a PrefillStep or a DecodeStep, by the engine's side."""

    def layer_written(self, layer: str) -> None:
        """The cache has the KV of the layer that is saved next. `layer`: its name, or ""."""

    def layer_computed(self, layer: str) -> None:
        """The layer has been computed. `layer`: its name."""

    def end_step(self, error: BaseException | None) -> None:
        """All layers have been computed, or `error` ended the forward pass."""

    def take_results(self, error: BaseException | None) -> TransferResults:
        """Returns the transfers that have ended. May wait as long as the step says. `error`: as in `end_step`."""
        return TransferResults()

    def take_lost_blocks(self) -> set[int]:
        """Returns blocks of requests that have just failed, if vLLM learns of failures by blocks."""
        return set()

    def take_report(self) -> WorkerReport | None:
        """Returns what the scheduler is told after this step."""
        return None

    # In the scheduler, on its thread.

    def take_handshakes(self, ranks: "Mapping[tuple[int, int], KVConnectorHandshakeMetadata]") -> None:
        """Takes the ranks' descriptions of themselves, by (pipeline stage, rank)."""

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Takes vLLM's block pool."""

    def arrived(self, request: "Request") -> None:
        """Takes note of a new request."""

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int | None:
        """Returns how many of the request's tokens a transfer will deliver. Called right before allocation.

        None: the request must not be scheduled.
        """
        return 0

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Takes the blocks that a request was allocated, per cache group."""

    def build_step(self, output: "SchedulerOutput") -> PrefillStep | DecodeStep:
        """Returns the step for the ranks that belongs to vLLM's step `output`."""
        raise NotImplementedError

    def update(self, report: WorkerReport | None, sent: set[str], received: set[str]) -> None:
        """Takes the ranks' report, and requests that all ranks have reported as sent, or as received or failed."""

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Takes note of a request's end. Returns whether its blocks must be kept, and what its response says."""
        return False, None

    def has_pending_pushes(self) -> bool:
        """Whether a request has ended whose blocks the ranks may still read."""
        return False

    # In either.

    def take_stats(self) -> Data | None:
        """Returns what was counted since the last call. None: nothing is reported."""
        return None

    def close(self) -> None:
        """Closes all that the role owns, even if a part of it raises."""
