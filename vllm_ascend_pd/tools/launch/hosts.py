# SPDX-License-Identifier: Apache-2.0
"""Reads hosts.yaml, which describes a cluster, and turns it into the commands for each host. Starts nothing."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import msgspec
import yaml

from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.tools.launch.engine import REMOVED, EngineOptions, EngineSide, parse_options
from vllm_ascend_pd.tools.vllm_serve import CommandError

_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)\Z", re.IGNORECASE)
_REMOVED = {name: f"give --{name.replace('_', '-')} in args" for name in EngineOptions.__annotations__}
_REMOVED |= {option[2:].replace("-", "_"): instead for option, instead in REMOVED.items()}
_REMOVED |= {"listen": "give --host in args", "engine_id": "vLLM makes a new one at each start"}
_REMOVED |= dict.fromkeys(
    ("name", "state", "start_seconds", "stop_seconds"), "the launcher keeps no files and no times"
)
"""Keys of earlier versions, and what to do instead."""

Words = tuple[str | int | float, ...]


class LaunchedProcess(NamedTuple):
    """One process on one host."""

    name: str
    ssh: str | None
    """The destination for ssh. None: this machine."""
    command: tuple[str, ...]
    """Runs on the host."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine."""

    address: str
    """IP address at which other hosts reach it."""
    ssh: str | None = None
    """Destination for `ssh`: a name of its configuration, or `user@host`. Default: the address."""
    local: bool = False
    """Whether it is this machine, which needs no ssh."""


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine, on one host or several."""

    hosts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Keys of `hosts`. Each runs an equal part of the engine, and the first one serves HTTP."""
    args: Words = ()
    """Arguments of `scripts/launch_prefill.sh` or `scripts/launch_decode.sh`; those of `vllm serve` follow a `--`. The
    launcher adds `--address`, `--secret-file` and the nodes of an engine."""
    env: dict[str, str] = {}
    """Environment variables. None may hold secrets: see `--env-file`."""


class Proxy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The proxy. Its engines are those of the file."""

    host: str
    """A key of `hosts`."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    """Port for clients and tickets."""
    args: Words = ()
    """Further arguments of `vllm-ascend-pd proxy`, such as `--host` to listen elsewhere than at the host's address."""


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. Paths are paths on the hosts. Files with secrets must exist on each host, with mode 0600."""

    hosts: dict[str, Host]
    """The machines, each under a name that you choose."""
    prefill: Annotated[tuple[EngineEntry, ...], msgspec.Meta(min_length=1)]
    """Prefill engines, at least one."""
    decode: Annotated[tuple[EngineEntry, ...], msgspec.Meta(min_length=1)]
    """Decode engines, at least one."""
    proxy: Proxy
    """The proxy, which clients talk to."""
    args: Words = ()
    """Arguments of all engines' launch scripts, before an engine's own: `--device`, and the model behind a `--`."""
    secret_file: str | None = None
    """The cluster's secret (`vllm-ascend-pd secret`, security.md), at this path on each host. Default:
    `~/.config/vllm-ascend-pd/secret` there. Not needed if all addresses are loopback."""
    python: str | None = None
    """Python with vLLM and this package. Default: the path of the one that runs here."""
    repository: str | None = None
    """Path of this repository. Default: the same path as here."""

    def proxy_url(self) -> str:
        return f"http://{authority(self.address(self.proxy.host), self.proxy.port)}"

    def address(self, host: str) -> str:
        if host not in self.hosts:
            raise ValueError(f"hosts: no host {host!r}, which another key names")
        return self.hosts[host].address


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Refuses keys that are listed twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key, _ in node.value if keys.count(key.value) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[1].value} is listed twice", problem_mark=twice[1].start_mark)
        return dict(super().construct_mapping(node, deep))


def parse_hosts(text: str) -> Cluster:
    """Raises ValueError, which names the key."""
    try:
        return msgspec.convert(yaml.load(text, _Loader), Cluster)
    except (yaml.YAMLError, RecursionError, msgspec.ValidationError) as error:
        unknown = re.search(r"unknown field `(.*?)`", str(error))
        removed = _REMOVED.get(unknown[1]) if unknown else None
        raise ValueError(f"{error}; it was removed: {removed}" if removed else str(error)) from None


def make_plan(cluster: Cluster, python: str, repository: str) -> list[LaunchedProcess]:
    """Returns all processes. `python` and `repository` are the defaults of the file's keys. Raises ValueError."""
    plan: list[LaunchedProcess] = []

    def add(name: str, host: str, *command: str) -> None:
        there = cluster.hosts[host]
        plan.append(LaunchedProcess(name, None if there.local else there.ssh or there.address, command))

    python, repository = cluster.python or python, cluster.repository or repository
    secret = [] if cluster.secret_file is None else ["--secret-file", cluster.secret_file]
    proxy = [python, "-m", "vllm_ascend_pd.cli", "proxy", "--host", cluster.address(cluster.proxy.host)]
    proxy += ["--port", str(cluster.proxy.port), "--metaserver-url", cluster.proxy_url(), *secret]
    for side, i, engine in [(role, n, one) for role in EngineSide for n, one in enumerate(getattr(cluster, role))]:
        if variable := next(filter(_SECRET_VARIABLE.search, engine.env), None):
            reason = "looks like a secret, and every user can read command lines: put it into a file for --env-file"
            raise ValueError(f"{side}[{i}].env.{variable}: {reason}")
        variables = (f"{name}={value}" for name, value in engine.env.items())
        script = ("env", f"PYTHON={python}", *variables, f"{repository}/scripts/launch_{side}.sh")
        name, head, nodes = f"{side}-{i}", cluster.address(engine.hosts[0]), len(engine.hosts)
        for rank, host in enumerate(engine.hosts):
            words = ["--address", cluster.address(host), *secret]
            if nodes > 1:
                words += ["--nodes", str(nodes), "--node-rank", str(rank), "--head-address", head]
            words += _joined(cluster.args, engine.args)
            try:
                http_port = _http_port(side, words)
            except CommandError as error:
                raise ValueError(f"{side}[{i}].args: {error}") from None
            add(f"{name}-node-{rank}" if nodes > 1 else name, host, *script, *words)
        proxy += [f"--{side}", f"http://{authority(head, http_port)}"]
    add("proxy", cluster.proxy.host, *proxy, *map(str, cluster.proxy.args))
    return plan


def _http_port(side: EngineSide, words: list[str]) -> int:
    """Checks the words of a launch script. Returns the engine's port. Raises CommandError."""
    options = parse_options(side, words, f"launch_{side}.sh")
    if options is None or options.dry_run:
        raise CommandError("--help and --dry-run start no engine")
    options.check()
    return options.http_port


def _joined(*args: Words) -> list[str]:
    """Returns all words before a `--`, then all words behind one."""
    options: list[str] = []
    arguments: list[str] = []
    for words in args:
        end = words.index("--") if "--" in words else len(words)
        options += map(str, words[:end])
        arguments += map(str, words[end + 1 :])
    return [*options, "--", *arguments]
