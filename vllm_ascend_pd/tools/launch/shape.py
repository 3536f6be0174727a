# SPDX-License-Identifier: Apache-2.0
"""Spreads an engine over nodes, and says so in vLLM's own arguments.

vLLM 0.23 to 0.32 (`vllm/entrypoints/cli/serve.py`, `vllm/engine/arg_utils.py`) has two ways:

- If each data-parallel replica fits on a node, nodes have whole replicas: `--data-parallel-size-local`. All nodes but
  the first also get `--headless` and `--data-parallel-start-rank`.
- If a replica spans several nodes: `--nnodes`, `--node-rank` and `--master-addr`.

The first node serves HTTP, and the others have no HTTP port. With Ray (`--executor ray`), vLLM is started on the first
node only, and Ray starts processes on the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Executor(enum.StrEnum):
    """What starts an engine's ranks: vLLM itself (`mp`), or a Ray cluster that already runs."""

    MP = "mp"
    RAY = "ray"


class ShapeError(ValueError):
    """The sizes of an engine contradict each other. The message is for the operator."""


@dataclass(frozen=True)
class ParallelSizes:
    """The parallel sizes of one engine, and the number of its nodes. Raises ShapeError."""

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
                f"which is not a multiple of {self.nodes} nodes"
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
        """Data-parallel indices of the engine cores on node `rank`. With Ray, vLLM places them, so all are returned."""
        if self.executor is Executor.RAY:
            return range(self.dp)
        if self.spans_nodes:
            return range(1 if rank == 0 else 0)
        local = self.dp // self.nodes
        return range(rank * local, (rank + 1) * local)

    def arguments(self, rank: int, head: str | None, port: int) -> list[str]:
        """Returns the arguments of `vllm serve` on node `rank`. `head` is the first node's address, `port` a free port
        there."""
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
            raise ShapeError("an engine on several nodes needs the address of the first one: --head-address")
        if not 0 <= rank < self.nodes:
            raise ShapeError(f"node {rank} of {self.nodes} does not exist: nodes are numbered from 0")
        headless = ["--headless"] if rank else []
        if self.spans_nodes:
            place = ["--nnodes", str(self.nodes), "--node-rank", str(rank)]
            return [*arguments, *place, "--master-addr", head, "--master-port", str(port), *headless]
        local = self.dp // self.nodes
        arguments += ["--data-parallel-size-local", str(local)]
        arguments += ["--data-parallel-address", head, "--data-parallel-rpc-port", str(port), *headless]
        return arguments + (["--data-parallel-start-rank", str(rank * local)] if rank else [])
