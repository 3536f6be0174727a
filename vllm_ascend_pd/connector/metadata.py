# SPDX-License-Identifier: Apache-2.0
"""vLLM's metadata classes around this package's messages (`core/step.py`). vLLM pickles them between processes."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_ascend_pd.core.step import WorkerReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step, from the scheduler to every rank."""

    # A `PrefillStep` or a `DecodeStep`, by the engine's side.
    step: Any


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A report, from ranks to the scheduler. vLLM aggregates those of all ranks into one."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.merge(other.report))


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A decode rank's description, from the rank to the scheduler, when the engine starts."""

    # The rank's `RankDescription`, encoded: nothing in between reads it.
    encoded: bytes
    # As in `EngineDescription`. The same on all ranks.
    settings: dict[str, str] = field(default_factory=dict)
