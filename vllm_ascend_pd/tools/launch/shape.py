# SPDX-License-Identifier: Apache-2.0
"""Spreads an engine over nodes, says so in vLLM's own arguments, and checks what a node has for it: NPUs and ports.

vLLM 0.23 to 0.32 (`vllm/entrypoints/cli/serve.py`, `vllm/engine/arg_utils.py`) has two ways:

- If each data-parallel replica fits on a node, nodes have whole replicas: `--data-parallel-size-local`. All nodes but
  the first also get `--headless` and `--data-parallel-start-rank`.
- If a replica spans several nodes: `--nnodes`, `--node-rank` and `--master-addr`.

The first node serves HTTP, and the others have no HTTP port.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_ascend_pd.core.ascend import ascend_ports
from vllm_ascend_pd.tools.serve_command import CommandError

DEFAULT_KV_PORT = 19000
"""Below Mooncake's ports and those that the kernel gives to outgoing connections (32768 and above)."""

HEAD_PORT = 13345
"""Port at which an engine's nodes connect. It is below the kernel's ephemeral ports."""


class DeviceType(enum.StrEnum):
    """An Atlas server, or the CPU for tests."""

    A2 = "a2"
    A3 = "a3"
    CPU = "cpu"

    @property
    def per_node(self) -> int | None:
        """NPUs, as vllm-ascend counts them: an A3 server has 8 with two chips each. None for the CPU."""
        return {"a2": 8, "a3": 16}.get(self.value)

    @property
    def mooncake_ports(self) -> range:
        """The ports of all NPUs of a node. vllm-ascend's guide to several nodes reserves ten times as many."""
        each = list(ascend_ports(range(self.per_node or 0), {}).values())
        return range(each[0].start, each[-1].stop) if each else range(0)


@dataclass(frozen=True)
class ParallelSizes:
    """The parallel sizes of one engine, and the number of its nodes. Raises CommandError."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        if not self.devices:
            raise CommandError("a parallel size is 0")
        if self.nodes == 1:
            return
        if self.devices % self.nodes:
            raise CommandError(
                f"tensor x pipeline x data parallel is {self.tp} x {self.pp} x {self.dp} = {self.devices} devices, "
                f"which is not a multiple of {self.nodes} nodes",
            )
        if self.replica % self.per_node and self.per_node % self.replica:
            raise CommandError(
                f"a node has {self.per_node} devices, a data-parallel replica {self.replica}: neither is a multiple of "
                "the other",
            )
        if self.spans_nodes and self.dp > 1:
            raise CommandError(
                f"each of {self.dp} data-parallel replicas would span {self.replica // self.per_node} nodes: start "
                "them as engines of their own",
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

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.nodes:
            raise CommandError(f"node {rank} of {self.nodes} does not exist: nodes are numbered from 0")

    def arguments(self, rank: int, head: str | None, port: int) -> list[str]:
        """Returns what `vllm serve` is told of the nodes, on node `rank`.

        head: the first node's address.
        port: a free port there.
        """
        if self.nodes == 1:
            return []
        if head is None:
            raise CommandError("an engine on several nodes needs the address of the first one: --head-address")
        self.check_rank(rank)
        headless = ["--headless"] if rank else []
        if self.spans_nodes:
            place = ["--nnodes", str(self.nodes), "--node-rank", str(rank)]
            return [*place, "--master-addr", head, "--master-port", str(port), *headless]
        local = self.dp // self.nodes
        arguments = ["--data-parallel-size-local", str(local)]
        arguments += ["--data-parallel-address", head, "--data-parallel-rpc-port", str(port), *headless]
        return arguments + (["--data-parallel-start-rank", str(rank * local)] if rank else [])


def check_kv_port(device: DeviceType, kv_port: int, shape: ParallelSizes, port: int) -> None:
    """Raises CommandError if a port of decode's listeners, `kv_port` + data-parallel index, has another use."""
    ports, taken = range(kv_port, kv_port + shape.dp), device.mooncake_ports
    reason = None
    if ports.stop > 65536:
        reason = f"--kv-port {kv_port}: too few ports below 65536 for {shape.dp} data-parallel replicas"
    elif ports.start < taken.stop and taken.start < ports.stop:
        reason = (
            f"--kv-port {kv_port}: Mooncake listens on ports {taken.start} to {taken.stop - 1} of an "
            f"{device.value.upper()} server; choose a port below {taken.start}"
        )
    elif port in ports:
        reason = f"--port {port} is a side-channel port of decode ({ports.start} to {ports.stop - 1})"
    if reason is not None:
        raise CommandError(reason)
