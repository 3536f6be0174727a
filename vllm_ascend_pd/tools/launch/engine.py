# SPDX-License-Identifier: Apache-2.0
"""The options of scripts/launch_prefill.sh and launch_decode.sh, and the arguments of `vllm serve` that they become.

The launcher of a cluster checks its engines by the same options.
"""

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_ascend_pd.core.config import CONNECTOR, ConfigError, parse_config
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.tools.command_line import USAGE_ERROR, new_app
from vllm_ascend_pd.tools.launch.shape import (
    DEFAULT_KV_PORT,
    HEAD_PORT,
    DeviceType,
    EngineOptionsError,
    Executor,
    ParallelSizes,
    check_kv_port,
)
from vllm_ascend_pd.tools.vllm_serve import KV_ROLES, REPLACES_CONNECTOR, table

_QUIET = "disable-access-log-for-endpoints"
"""Keeps the proxy's health and metrics requests, one per second, out of vLLM's log. vLLM 0.23 to 0.32 has it."""


class EngineSide(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def default_port(self) -> int:
        return {"prefill": 8100, "decode": 8200}[self.value]


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
    model: Annotated[str, _option("Model to serve: a folder, or a name that vLLM finds.", "PATH")]
    device: Annotated[
        DeviceType, _option("Atlas servers with 8 (a2) or 16 (a3) NPUs as vLLM counts them, or the CPU for tests.")
    ]
    served_model_name: Annotated[str | None, _option("The model's name for clients.", "NAME")] = None
    address: Annotated[
        str | None, _option("Address at which other nodes reach this one.", "IP", show_default="with cpu 127.0.0.1")
    ] = None
    interface: Annotated[str | None, _option("Network interface with --address.", "NAME", show_default="looked up")] = (
        None
    )
    port: Annotated[int | None, _port("HTTP port of the engine.", show_default="8100 for prefill, 8200 for decode")] = (
        None
    )
    tp: Annotated[int, _size("Tensor-parallel size of the engine.")] = 1
    pp: Annotated[int, _size("Pipeline-parallel size.")] = 1
    dp: Annotated[int, _size("Data-parallel size.")] = 1
    devices: Annotated[
        str | None,
        _option("NPUs of this node, such as 0,1,2,3.", "LIST", show_default="the first ones, as many as needed"),
    ] = None
    nodes: Annotated[
        int, _size("Nodes of the engine. Run the script on each, with the same options but --node-rank.")
    ] = 1
    node_rank: Annotated[int, _size("Number of this node, from 0. Node 0 serves HTTP.", 0)] = 0
    head_address: Annotated[str | None, _option("Address of node 0, for the others.", "HOST")] = None
    head_port: Annotated[int, _port("A free port of node 0, below those for outgoing connections.")] = HEAD_PORT
    executor: Annotated[
        Executor, _option("ray: the nodes are a Ray cluster, and the script runs only on the first one.")
    ] = Executor.MP
    ray_node: Annotated[
        bool,
        typer.Option("--ray-node", help="Start a node of the Ray cluster instead of vLLM, in the same environment."),
    ] = False
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
    metaserver: Annotated[
        list[str] | None,
        _option(
            "Decode: a proxy that the engine may post tickets to. May be repeated.",
            "URL",
            show_default="a proxy on this host",
        ),
    ] = None
    metaserver_token: Annotated[
        str | None, _option("Decode: file with the bearer token that the proxy requires.", "FILE")
    ] = None
    decode_host: Annotated[
        list[str] | None,
        _option(
            "Prefill: address, network (10.0.0.0/24) or name of a decode engine that it may write to. May be repeated.",
            "HOST",
            show_default="private networks, or any with --ticket-secret",
        ),
    ] = None
    side_channel_keys: Annotated[
        str | None, _option("File of `vllm-ascend-pd keygen`, the same on all engines.", "FILE")
    ] = None
    ticket_secret: Annotated[
        str | None, _option("File of `vllm-ascend-pd keygen --ticket-secret`, the same on all engines.", "FILE")
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
    def shape(self) -> ParallelSizes:
        """Raises EngineOptionsError."""
        return ParallelSizes(self.tp, self.pp, self.dp, self.nodes, self.executor)

    @property
    def http_port(self) -> int:
        return self.port or self.role.default_port

    def check(self, arguments: Sequence[str]) -> None:
        """Raises EngineOptionsError for options that cannot work. `arguments`: the operator's own of `vllm serve`."""
        if not self.model or self.model.startswith("-"):
            raise EngineOptionsError(f"--model {self.model!r} is empty or begins with a dash")
        self.shape.check_rank(self.node_rank)
        self.transfer_config()
        for argument in arguments:
            if (reason := refused_argument(argument)) is not None:
                raise EngineOptionsError(reason)

    def transfer_config(self, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the value of `--kv-transfer-config`, checked by the connector's own configuration.

        beside: another connector's entry of a MultiConnector.

        Raises EngineOptionsError.
        """
        self._check_side()
        own = {
            "metaserver_allowlist": self.metaserver,
            "decode_allowlist": self.decode_host,
            "metaserver_token_file": self.metaserver_token,
            "side_channel_key_file": self.side_channel_keys,
            "ticket_secret_file": self.ticket_secret,
        }
        own = {name: value for name, value in own.items() if value}
        more = _parse_extra(self.extra or [])
        if twice := sorted(own.keys() & more.keys()):
            raise EngineOptionsError(f"--extra {twice[0]}: use the script's own option for this key")
        try:
            Allowlist(parse_config(own | more).metaserver_allowlist, "localhost")
            HostList(self.decode_host or (), "")
        except (ConfigError, ValueError) as error:
            raise EngineOptionsError(str(error)) from None
        kv_role = KV_ROLES[self.role]
        whole: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": kv_role}
        if self.role is EngineSide.DECODE:
            whole["kv_port"] = self.kv_port or DEFAULT_KV_PORT
        if own or more:
            whole["kv_connector_extra_config"] = own | more
        if beside is not None:
            if beside.get("kv_connector") in (None, CONNECTOR, "MultiConnector"):
                raise EngineOptionsError("the other connector's file must be one JSON object with its kv_connector")
            # Ours comes first: on decode it must be the first one that has a handshake.
            listed = {"connectors": [whole, {"kv_role": kv_role, **beside}]}
            whole = {"kv_connector": "MultiConnector", "kv_role": kv_role, "kv_connector_extra_config": listed}
        if self.load_failure_policy is not None:
            whole["kv_load_failure_policy"] = self.load_failure_policy
        return whole

    def _check_side(self) -> None:
        """Refuses options that have no meaning on this side, and ports that have another use."""
        given: dict[str, object]
        if self.role is EngineSide.PREFILL:
            given = {
                "--kv-port": self.kv_port,
                "--metaserver": self.metaserver,
                "--metaserver-token": self.metaserver_token,
                "--load-failure-policy": self.load_failure_policy,
            }
            reason = "only for decode; prefill accepts no connections and posts no tickets"
        else:
            given = {"--decode-host": self.decode_host}
            reason = "only for prefill; decode connects to no decode engine"
            check_kv_port(self.device, self.kv_port or DEFAULT_KV_PORT, self.shape, self.http_port)
        for option, value in given.items():
            if value:
                raise EngineOptionsError(f"{option}: {reason}")
        if self.load_failure_policy not in (None, "fail", "recompute"):
            raise EngineOptionsError(f"--load-failure-policy {self.load_failure_policy}: must be fail or recompute")

    def serve_words(self, arguments: Sequence[str]) -> list[str]:
        """Returns the words behind `vllm`. `arguments`: the operator's own. Raises EngineOptionsError."""
        self.check(arguments)
        address = self.address or ""
        words = ["serve", self.model]
        serves_http = self.node_rank == 0 or self.nodes == 1
        if serves_http:
            words += ["--host", address, "--port", str(self.http_port)]
        if self.served_model_name is not None:
            words += ["--served-model-name", self.served_model_name]
        # The first node binds to its own address, so that must not be a name.
        head = address if self.node_rank == 0 else self.head_address
        words += self.shape.arguments(self.node_rank, head, self.head_port)
        config = self.transfer_config(None if self.beside is None else _read_entry(self.beside))
        words += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
        given = [word.option.name for each in arguments if (word := table().read(each)) is not None and word.option]
        if serves_http and _QUIET not in given:
            words += [f"--{_QUIET}", "/health,/metrics"]
        words += arguments
        if broken := next((word for word in words if "\n" in word), None):
            raise EngineOptionsError(f"{broken[:40]!r} has more than one line")
        return words

    def ray_words(self) -> list[str]:
        """Returns the words behind `ray` on one node of the engine's Ray cluster. Raises EngineOptionsError."""
        if self.executor is not Executor.RAY:
            raise EngineOptionsError("--ray-node needs --executor ray")
        self.shape.check_rank(self.node_rank)
        common = [f"--node-ip-address={self.address}", "--disable-usage-stats", "--block"]
        if self.node_rank == 0:
            return ["start", "--head", f"--port={self.head_port}", *common]
        if self.head_address is None:
            raise EngineOptionsError("all nodes but the first need its address: --head-address")
        return ["start", f"--address={self.head_address}:{self.head_port}", *common]


def parse_options(side: EngineSide, words: Sequence[str]) -> EngineOptions:
    """Parses and checks all words of a launch script, with those behind `--`. Raises EngineOptionsError."""
    app = new_app()
    app.command()(EngineOptions)
    end = words.index("--") if "--" in words else len(words)
    try:
        options = app(["--role", side, *words[:end]], standalone_mode=False)
    except USAGE_ERROR as error:
        raise EngineOptionsError(" ".join(error.format_message().split())) from None
    if not isinstance(options, EngineOptions) or options.dry_run:
        raise EngineOptionsError("--help and --dry-run start no engine")
    options.check(words[end + 1 :])
    return options


def _parse_extra(entries: list[str]) -> dict[str, Any]:
    """Parses `KEY=VALUE` pairs. A value that is not JSON is a string. Raises EngineOptionsError."""
    extra = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise EngineOptionsError(f"--extra {entry}: must be KEY=VALUE")
        try:
            extra[key] = json.loads(value)
        except json.JSONDecodeError:
            extra[key] = value
    return extra


def _read_entry(path: Path) -> dict[str, Any]:
    """Reads another connector's entry for a MultiConnector. Raises EngineOptionsError."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineOptionsError(f"--beside {path}: {error}") from None
    if not isinstance(entry, dict):
        raise EngineOptionsError(f"--beside {path}: not a JSON object")
    return entry


_OWN = {
    "port": "--port",
    "host": "--address",
    "tensor-parallel-size": "--tp",
    "pipeline-parallel-size": "--pp",
    "data-parallel-size": "--dp",
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
    "distributed-executor-backend": "--executor",
    "kv-transfer-config": "this script's options",
    "served-model-name": "--served-model-name",
    "model": "--model",
}
"""Options of `vllm serve` that the launch scripts set, and what to use instead."""
_SECRET = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
_SCRIPTS = dict.fromkeys(("--dry-run", "--help", "-h"), "is an option of the launch script: put it before the --")
_OTHERS = {
    "help": _SCRIPTS["--help"],
    "config": "names a file that could contradict this script: give its options here",
    "prefill-context-parallel-size": "is not supported here: start such an engine with `vllm serve` itself",
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
    word = table().read(argument)
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
