# SPDX-License-Identifier: Apache-2.0
"""What scripts/launch_prefill.sh and launch_decode.sh run: prints `vllm serve`'s arguments, one a line.

The first line is the number of devices that the node needs. Exits with 2 and a reason for options that make no sense
together; the scripts' own comments document the options.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import run_app
from vllm_ascend_pd.tools.doctor.ports import ascend_ports
from vllm_ascend_pd.tools.launch.arguments import refused_argument
from vllm_ascend_pd.tools.launch.shape import Executor, ParallelSizes, ShapeError
from vllm_ascend_pd.tools.launch.transfer import ConnectorOptions, ConnectorOptionsError, EngineSide, parse_extra
from vllm_ascend_pd.tools.vllm_serve import PLUGIN, PLUGINS, plugins_with_ours, table

DEFAULT_KV_PORT = 19000
"""Below Mooncake's ports and those that the kernel gives to outgoing connections (32768 and above)."""

DEVICES_PER_NODE = {"a2": 8, "a3": 16, "cpu": None}
"""NPUs, as vllm-ascend counts them: an A3 server has 8 with two chips each."""


def _mooncake_ports(devices: int | None) -> range:
    """The ports of all NPUs of a node. vllm-ascend's guide to several nodes reserves ten times as many."""
    each = list(ascend_ports(range(devices or 0), {}).values())
    return range(each[0].start, each[-1].stop) if each else range(0)


MOONCAKE_PORTS = {device: _mooncake_ports(devices) for device, devices in DEVICES_PER_NODE.items()}


class DeviceType(enum.StrEnum):
    A2 = "a2"
    A3 = "a3"
    CPU = "cpu"


_Port = typer.Option(min=1, max=65535)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": []})
def main(
    role: Annotated[EngineSide, typer.Option()],
    device: Annotated[DeviceType, typer.Option()],
    model: Annotated[str, typer.Option()],
    address: Annotated[str, typer.Option()],
    port: Annotated[int, _Port],
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    listen: Annotated[str | None, typer.Option()] = None,
    served_model_name: Annotated[str | None, typer.Option()] = None,
    tp: Annotated[int, typer.Option(min=1)] = 1,
    pp: Annotated[int, typer.Option(min=1)] = 1,
    dp: Annotated[int, typer.Option(min=1)] = 1,
    executor: Annotated[Executor, typer.Option()] = Executor.MP,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    node_rank: Annotated[int, typer.Option(min=0)] = 0,
    head_address: Annotated[str | None, typer.Option()] = None,
    head_port: Annotated[int, _Port] = 13345,
    kv_port: Annotated[int | None, _Port] = None,
    engine_id: Annotated[str | None, typer.Option()] = None,
    load_failure_policy: Annotated[str | None, typer.Option()] = None,
    metaserver: Annotated[list[str] | None, typer.Option()] = None,
    decode_host: Annotated[list[str] | None, typer.Option()] = None,
    metaserver_token: Annotated[str | None, typer.Option()] = None,
    side_channel_keys: Annotated[str | None, typer.Option()] = None,
    ticket_secret: Annotated[str | None, typer.Option()] = None,
    extra: Annotated[list[str] | None, typer.Option()] = None,
    beside: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None,
    ray_node: Annotated[bool, typer.Option("--ray-node")] = False,
) -> None:
    try:
        if (plugins := plugins_with_ours(os.environ)) is not None:
            raise ShapeError(f"{PLUGINS} must name {PLUGIN}, too, or vLLM has no such connector: set it to {plugins}")
        shape = ParallelSizes(tp, pp, dp, nodes, executor)
        check_devices(device, shape)
        if ray_node:
            print(shape.per_node, *ray_words(shape, node_rank, address, head_address, head_port), sep="\n")
            return
        if role is EngineSide.DECODE:
            kv_port = check_kv_port(device, kv_port or DEFAULT_KV_PORT, shape, port)
        if not model or model.startswith("-"):
            raise ShapeError(f"--model {model!r} is empty or begins with a dash")
        if load_failure_policy not in (None, "fail", "recompute"):
            raise ConnectorOptionsError(f"--load-failure-policy {load_failure_policy}: must be fail or recompute")
        transfer = ConnectorOptions(
            role=role,
            kv_port=kv_port,
            engine_id=engine_id,
            load_failure_policy=load_failure_policy,
            metaservers=tuple(metaserver or ()),
            decode_hosts=tuple(decode_host or ()),
            metaserver_token_file=metaserver_token,
            side_channel_key_file=side_channel_keys,
            ticket_secret_file=ticket_secret,
            extra=parse_extra(extra or []),
            beside=None if beside is None else read_entry(beside),
        )
        words = ["serve", model]
        serves_http = node_rank == 0 or shape.nodes == 1
        if serves_http:
            words += ["--host", listen or address, "--port", str(port)]
        elif listen is not None:
            raise ShapeError("--listen: only the first node of an engine serves HTTP")
        if served_model_name is not None:
            words += ["--served-model-name", served_model_name]
        # The first node binds to its own address, so that must not be a name.
        words += shape.arguments(node_rank, address if node_rank == 0 else head_address, head_port)
        words += ["--kv-transfer-config", json.dumps(transfer.config(), separators=(",", ":"))]
        if serves_http:
            words += quiet(arguments or [])
        for argument in arguments or []:
            if (reason := refused_argument(argument)) is not None:
                raise ShapeError(reason)
        words += arguments or []
        if broken := next((word for word in words if "\n" in word), None):
            raise ShapeError(f"{broken[:40]!r} has more than one line")
    except (ShapeError, ConnectorOptionsError) as error:
        print(f"launch_{role.value}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(shape.per_node, *words, sep="\n")


def quiet(arguments: list[str]) -> list[str]:
    """Keeps the proxy's health and metrics requests, one per second, out of vLLM's log.

    vLLM 0.23 to 0.32 has this option. The operator's own value replaces it.
    """
    name = "disable-access-log-for-endpoints"
    given = [word.option.name for each in arguments if (word := table().read(each)) is not None and word.option]
    return [] if name in given else [f"--{name}", "/health,/metrics"]


def check_devices(device: DeviceType, shape: ParallelSizes) -> None:
    """Raises ShapeError if a node has fewer devices than `shape` needs."""
    most = DEVICES_PER_NODE[device.value]
    if most is not None and shape.per_node > most:
        raise ShapeError(
            f"{shape.per_node} devices on a node, but {device.value.upper()} servers have {most}: use more nodes"
        )


def check_kv_port(device: DeviceType, kv_port: int, shape: ParallelSizes, port: int) -> int:
    """Returns `kv_port`. Decode's listeners use the ports `kv_port` + data-parallel index.

    Raises ConnectorOptionsError if one of these ports has another use.
    """
    ports = range(kv_port, kv_port + shape.dp)
    taken = MOONCAKE_PORTS[device.value]
    if ports.stop > 65536:
        raise ConnectorOptionsError(
            f"--kv-port {kv_port}: too few ports below 65536 for {shape.dp} data-parallel replicas"
        )
    if ports.start < taken.stop and taken.start < ports.stop:
        raise ConnectorOptionsError(
            f"--kv-port {kv_port}: Mooncake listens on ports {taken.start} to {taken.stop - 1} of an "
            f"{device.value.upper()} server; choose a port below {taken.start}"
        )
    if port in ports:
        raise ConnectorOptionsError(
            f"--port {port} is a side-channel port of decode ({ports.start} to {ports.stop - 1})"
        )
    return kv_port


def ray_words(shape: ParallelSizes, rank: int, address: str, head: str | None, port: int) -> list[str]:
    """Returns the arguments of `ray` on one node of an engine's Ray cluster."""
    if shape.executor is not Executor.RAY:
        raise ShapeError("--ray-node needs --executor ray")
    if not 0 <= rank < shape.nodes:
        raise ShapeError(f"node {rank} of {shape.nodes} does not exist: nodes are numbered from 0")
    common = [f"--node-ip-address={address}", "--disable-usage-stats", "--block"]
    if rank == 0:
        return ["start", "--head", f"--port={port}", *common]
    if head is None:
        raise ShapeError("all nodes but the first need its address: --head-address")
    return ["start", f"--address={head}:{port}", *common]


def read_entry(path: Path) -> dict[str, object]:
    """Reads another connector's entry for a MultiConnector. Raises ConnectorOptionsError."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConnectorOptionsError(f"--beside {path}: {error}") from None
    if not isinstance(entry, dict):
        raise ConnectorOptionsError(f"--beside {path}: not a JSON object")
    return entry


if __name__ == "__main__":
    # Errors name the script that the operator ran; it gives the role first.
    run_app(app, "launch_prefill.sh" if sys.argv[1:3] == ["--role", "prefill"] else "launch_decode.sh")
