# SPDX-License-Identifier: Apache-2.0
"""The options of scripts/launch_prefill.sh and launch_decode.sh, and the arguments of `vllm serve` that they become.

The launcher of a cluster checks its engines by the same options. They say how an engine spreads over nodes, and are
checked against what a node has for it: NPUs and ports.
"""

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_ascend_pd.core.ascend import ascend_ports
from vllm_ascend_pd.core.config import CONNECTOR, ConfigError, parse_config
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.tools.command_line import USAGE_ERROR, new_app, removed_option
from vllm_ascend_pd.tools.vllm_serve import (
    KV_ROLES,
    REPLACES_CONNECTOR,
    CommandError,
    EngineArguments,
    read_arguments,
    read_word,
)

_QUIET = "disable-access-log-for-endpoints"
"""Keeps the proxy's health and metrics requests, one per second, out of vLLM's log. vLLM 0.23 to 0.32 has it."""

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
    """The parallel sizes of one engine, and the number of its nodes. Raises CommandError.

    vLLM 0.23 to 0.32 (`vllm/entrypoints/cli/serve.py`, `vllm/engine/arg_utils.py`) has two ways over several nodes:

    - If each data-parallel replica fits on a node, nodes have whole replicas: `--data-parallel-size-local`. All nodes
      but the first also get `--headless` and `--data-parallel-start-rank`.
    - If a replica spans several nodes: `--nnodes`, `--node-rank` and `--master-addr`.

    The first node serves HTTP, and the others have no HTTP port.
    """

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


class EngineSide(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def default_port(self) -> int:
        return {"prefill": 8100, "decode": 8200}[self.value]


_OF_DECODE = ("kv_port", "load_failure_policy")


def _option(text: str, metavar: str | None = None, **settings: Any) -> Any:
    return typer.Option(help=text, metavar=metavar, **settings)


def _port(text: str, **settings: Any) -> Any:
    return typer.Option(help=text, metavar="PORT", min=1, max=65535, **settings)


def _size(text: str, least: int = 1) -> Any:
    return typer.Option(help=text, metavar="N", min=least)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One node of an engine. typer makes the scripts' command line of the fields."""

    role: Annotated[EngineSide, typer.Option(hidden=True)]
    arguments: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="-- and the model, then options of `vllm serve`.")
    ]
    device: Annotated[
        DeviceType, _option("Atlas servers with 8 (a2) or 16 (a3) NPUs as vLLM counts them, or the CPU for tests.")
    ]
    address: Annotated[
        str | None, _option("Address at which other nodes reach this one.", "IP", show_default="with cpu 127.0.0.1")
    ] = None
    nodes: Annotated[
        int, _size("Nodes of the engine. Run the script on each, with the same options but --node-rank.")
    ] = 1
    node_rank: Annotated[int, _size("Number of this node, from 0. Node 0 serves HTTP.", 0)] = 0
    head_address: Annotated[str | None, _option("Address of node 0, for the others.", "HOST")] = None
    head_port: Annotated[int, _port("A free port of node 0, below those for outgoing connections.")] = HEAD_PORT
    kv_port: Annotated[
        int | None,
        _port(
            "Decode: port at which prefill engines ask for its description. Each data-parallel replica takes the next.",
            show_default=str(DEFAULT_KV_PORT),
        ),
    ] = None
    load_failure_policy: Annotated[
        str | None,
        _option(
            "Decode: whether a request whose KV does not arrive fails, or decode computes its prompt.",
            "[fail|recompute]",
            show_default="fail",
        ),
    ] = None
    secret_file: Annotated[
        str | None,
        _option(
            "The cluster's secret on this node, the same for all engines and proxies.",
            "FILE",
            show_default="~/.config/vllm-ascend-pd/secret, if it is there",
        ),
    ] = None
    beside: Annotated[
        Path | None,
        _option("JSON object of another connector, such as a KV pool's, for a MultiConnector of both.", "FILE"),
    ] = None
    extra: Annotated[
        list[str] | None,
        _option("Any other key of kv_connector_extra_config (docs/configuration.md). May be repeated.", "KEY=VALUE"),
    ] = None
    env_file: Annotated[
        Path | None, _option("NAME=VALUE lines with secrets (VLLM_API_KEY, HF_TOKEN, ...), mode 0600.", "FILE")
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print environment and command as a shell script, and start nothing."),
    ] = False

    @cached_property
    def serve(self) -> EngineArguments:
        """The model and the options of `vllm serve`."""
        return read_arguments(["vllm", "serve", *self.arguments], {})

    @cached_property
    def shape(self) -> ParallelSizes:
        """Raises CommandError."""
        tp, pp, dp = (self.serve.number(f"{which}-parallel-size", 1) for which in ("tensor", "pipeline", "data"))
        return ParallelSizes(tp, pp, dp, self.nodes)

    @property
    def http_port(self) -> int:
        return self.serve.number("port", self.role.default_port)

    def check(self) -> None:
        """Raises CommandError for options that cannot work."""
        model = self.arguments[0]
        if not model or model.startswith("-"):
            raise CommandError(f"the model comes first behind the --, not {model!r}")
        for argument in self.arguments:
            if (reason := refused_argument(argument)) is not None:
                raise CommandError(reason)
        self.shape.check_rank(self.node_rank)
        if not 0 < self.http_port < 65536:
            raise CommandError(f"--port {self.http_port}: no port")
        self.transfer_config()

    def transfer_config(self, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the value of `--kv-transfer-config`, checked by the connector's own configuration.

        beside: another connector's entry of a MultiConnector.

        Raises CommandError.
        """
        self._check_side()
        extra = _parse_extra(self.extra or [])
        if self.secret_file is not None:
            if "secret_file" in extra:
                raise CommandError("--extra secret_file: --secret-file is given, too: which?")
            extra["secret_file"] = self.secret_file
        try:
            Allowlist(parse_config(extra).peer_urls, "localhost")
        except (ConfigError, ValueError) as error:
            raise CommandError(str(error)) from None
        kv_role = KV_ROLES[self.role]
        whole: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": kv_role}
        if self.role is EngineSide.DECODE:
            whole["kv_port"] = self.kv_port or DEFAULT_KV_PORT
        if extra:
            whole["kv_connector_extra_config"] = extra
        if beside is not None:
            if beside.get("kv_connector") in (None, CONNECTOR, "MultiConnector"):
                raise CommandError("the other connector's file must be one JSON object with its kv_connector")
            # Ours comes first: on decode it must be the first one that has a handshake.
            listed = {"connectors": [whole, {"kv_role": kv_role, **beside}]}
            whole = {"kv_connector": "MultiConnector", "kv_role": kv_role, "kv_connector_extra_config": listed}
        if self.load_failure_policy is not None:
            whole["kv_load_failure_policy"] = self.load_failure_policy
        return whole

    def _check_side(self) -> None:
        """Refuses options that have no meaning on this side, and ports that have another use."""
        for name in _OF_DECODE:
            if getattr(self, name) and self.role is not EngineSide.DECODE:
                raise CommandError(f"--{name.replace('_', '-')}: only for decode")
        if self.role is EngineSide.DECODE:
            check_kv_port(self.device, self.kv_port or DEFAULT_KV_PORT, self.shape, self.http_port)
        if self.load_failure_policy not in (None, "fail", "recompute"):
            raise CommandError(f"--load-failure-policy {self.load_failure_policy}: must be fail or recompute")

    def serve_words(self) -> list[str]:
        """Returns the words behind `vllm`. Raises CommandError."""
        self.check()
        address = self.address or ""
        model, *others = self.arguments
        words = ["serve", model]
        # The first node binds to its own address, so that must not be a name.
        head = address if self.node_rank == 0 else self.head_address
        words += self.shape.arguments(self.node_rank, head, self.head_port)
        config = self.transfer_config(None if self.beside is None else _read_entry(self.beside))
        words += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
        if self.node_rank == 0:  # it serves HTTP
            own = {"host": address, "port": str(self.http_port), _QUIET: "/health,/metrics"}
            words += [word for name in own if name not in self.serve.names for word in (f"--{name}", own[name])]
        words += others
        if broken := next((word for word in words if "\n" in word), None):
            raise CommandError(f"{broken[:40]!r} has more than one line")
        return words


def parse_options(side: EngineSide, words: Sequence[str], script: str, text: str = "") -> EngineOptions | None:
    """Parses the words of a launch script. Returns None after `--help`, which shows `text`. Raises CommandError."""
    if reason := removed_option(words, REMOVED):
        raise CommandError(reason)
    app = new_app()
    app.command(help=text)(EngineOptions)
    try:
        options = app(["--role", side, *words], prog_name=script, standalone_mode=False)
    except USAGE_ERROR as error:
        raise CommandError(" ".join(error.format_message().split())) from None
    return options if isinstance(options, EngineOptions) else None


def _parse_extra(entries: list[str]) -> dict[str, Any]:
    """Parses `KEY=VALUE` pairs. A value that is not JSON is a string. Raises CommandError."""
    extra = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise CommandError(f"--extra {entry}: must be KEY=VALUE")
        try:
            extra[key] = json.loads(value)
        except json.JSONDecodeError:
            extra[key] = value
    return extra


def _read_entry(path: Path) -> dict[str, Any]:
    """Reads another connector's entry for a MultiConnector. Raises CommandError."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--beside {path}: {error}") from None
    if not isinstance(entry, dict):
        raise CommandError(f"--beside {path}: not a JSON object")
    return entry


_RAY = "is not supported here: examples/ray starts engines over Ray"
_BEHIND = "give vLLM its own option, behind the --"
_ONE_SECRET = "give --secret-file FILE, made by `vllm-ascend-pd secret`"
_ADMITS = "whoever has the cluster's secret is admitted"
REMOVED = {
    "--model": "the model comes first behind the --",
    **dict.fromkeys(("--served-model-name", "--port", "--tp", "--pp", "--dp"), _BEHIND),
    **dict.fromkeys(("--executor", "--ray-node"), "examples/ray starts engines over Ray"),
    "--devices": "set ASCEND_RT_VISIBLE_DEVICES in the environment",
    "--interface": "set GLOO_SOCKET_IFNAME in the environment",
    "--metaserver-token": "give --extra metaserver_token_file=FILE",
    "--side-channel-keys": _ONE_SECRET,
    "--ticket-secret": _ONE_SECRET,
    "--metaserver": f"{_ADMITS}; name metaservers that do not sign in --extra peers=LIST",
    "--decode-host": f"{_ADMITS}; --extra peers=LIST admits fewer hosts",
}
"""Options of earlier versions, each with what replaces it."""
_OWN = {
    "host": "--address",
    "data-parallel-size-local": "--nodes",
    "data-parallel-address": "--head-address",
    "data-parallel-rpc-port": "--head-port",
    "data-parallel-start-rank": "--node-rank",
    "data-parallel-rank": "--node-rank",
    "headless": "--node-rank",
    "nnodes": "--nodes",
    "node-rank": "--node-rank",
    "master-addr": "--head-address",
    "master-port": "--head-port",
    "kv-transfer-config": "this script's options",
}
"""Options of `vllm serve` that the launch scripts set, and what to use instead."""
_SECRET = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
_SCRIPTS = dict.fromkeys(("--dry-run", "--help", "-h"), "is an option of the launch script: put it before the --")
_OTHERS = {
    "help": _SCRIPTS["--help"],
    "config": "names a file that could contradict this script: give its options here",
    "model": "is not needed: the model comes first behind the --",
    "prefill-context-parallel-size": "is not supported here: start such an engine with `vllm serve` itself",
    "distributed-executor-backend": _RAY,
    REPLACES_CONNECTOR: "makes vLLM replace this connector: give OffloadingConnector's entry with --beside, for a "
    "MultiConnector of both",
}
"""Other options, and why they are refused."""
REFUSED = frozenset({*_OWN, *_SECRET, *_OTHERS})


def refused_argument(argument: str) -> str | None:
    """Returns why an argument may not be passed to `vllm serve`, or None if it may.

    A short form of several options is refused if one of them is: another vLLM may have only that one.
    """
    if "\n" in argument or "\0" in argument:
        return f"{argument[:40]!r} has more than one line"
    if argument in _SCRIPTS:
        return f"{argument} {_SCRIPTS[argument]}"
    word = read_word(argument)
    options = () if word is None else word.perhaps if word.option is None else (word.option,)
    name = next((option.name for option in options if option.name in REFUSED), None)
    if name is None:
        return None
    if name in _SECRET:
        return (
            f"--{name}: every user of the machine can read command lines; put {_SECRET[name]} into a file of mode 0600 "
            "and name the file with --env-file"
        )
    if name in _OWN:
        return f"--{name} is set here: use {_OWN[name]}"
    return f"--{name} {_OTHERS[name]}"
