# SPDX-License-Identifier: Apache-2.0
"""How an engine is spread over nodes, in vLLM's own arguments.

vLLM 0.23 to 0.32 (`vllm/entrypoints/cli/serve.py`, `vllm/engine/arg_utils.py`) knows two ways. Where each data-parallel
replica fits on a node, nodes hold whole replicas: `--data-parallel-size-local`, and `--headless` with
`--data-parallel-start-rank` on all nodes but the first. A replica of several nodes is `--nnodes`, `--node-rank`,
`--master-addr`. The first node serves HTTP, the others have no port of their own. With Ray (`--executor ray`) vLLM is
started on the first node alone, and Ray has processes on the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Executor(enum.StrEnum):
    """Who starts an engine's ranks: vLLM by itself (`mp`), or a Ray cluster that runs already."""

    MP = "mp"
    RAY = "ray"


class ShapeError(ValueError):
    """Sizes that make no sense together, in words for the operator."""


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of one engine: tensor, pipeline and data parallel, and the nodes it runs on. Raises ShapeError."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    executor: Executor = Executor.MP

    def __post_init__(self) -> None:
        if self.nodes == 1:
            return
        if self.devices % self.nodes:
            raise ShapeError(
                f"tensor x pipeline x data parallel is {self.tp} x {self.pp} x {self.dp} = {self.devices} devices, "
                f"which {self.nodes} nodes do not share evenly"
            )
        if self.replica % self.per_node and self.per_node % self.replica:
            raise ShapeError(
                f"a node has {self.per_node} devices, a data-parallel replica {self.replica}: neither is a multiple of "
                "the other"
            )
        if self.spans_nodes and self.dp > 1 and self.executor is Executor.MP:
            raise ShapeError(
                f"each of {self.dp} data-parallel replicas would span {self.replica // self.per_node} nodes: start "
                "them as engines of their own"
            )

    @property
    def devices(self) -> int:
        return self.replica * self.dp

    @property
    def replica(self) -> int:
        """Devices of one data-parallel replica."""
        return self.tp * self.pp

    @property
    def per_node(self) -> int:
        return self.devices // self.nodes

    @property
    def spans_nodes(self) -> bool:
        """Whether one replica is on several nodes."""
        return self.replica > self.per_node

    def listeners(self, rank: int) -> range:
        """Data-parallel indices of the engine cores that run on a node. With Ray vLLM places them itself: any."""
        if self.executor is Executor.RAY:
            return range(self.dp)
        if self.spans_nodes:
            return range(1 if rank == 0 else 0)
        local = self.dp // self.nodes
        return range(rank * local, (rank + 1) * local)

    def arguments(self, rank: int, head: str | None, port: int) -> list[str]:
        """For `vllm serve` on node `rank`. `head`: address of the first node, `port`: a free one there."""
        arguments = ["--tensor-parallel-size", str(self.tp)]
        if self.pp > 1:
            arguments += ["--pipeline-parallel-size", str(self.pp)]
        if self.dp > 1:
            arguments += ["--data-parallel-size", str(self.dp)]
        if self.executor is Executor.RAY:
            arguments += ["--distributed-executor-backend", "ray"]
            return arguments + (["--data-parallel-backend", "ray"] if self.dp > 1 else [])
        if self.nodes == 1:
            return arguments
        if head is None:
            raise ShapeError("an engine of several nodes needs the first one's address: --head-address")
        if not 0 <= rank < self.nodes:
            raise ShapeError(f"there is no node {rank} of {self.nodes}: they count from 0")
        headless = ["--headless"] if rank else []
        if self.spans_nodes:
            place = ["--nnodes", str(self.nodes), "--node-rank", str(rank)]
            return [*arguments, *place, "--master-addr", head, "--master-port", str(port), *headless]
        local = self.dp // self.nodes
        arguments += ["--data-parallel-size-local", str(local)]
        arguments += ["--data-parallel-address", head, "--data-parallel-rpc-port", str(port), *headless]
        return arguments + (["--data-parallel-start-rank", str(rank * local)] if rank else [])
