# SPDX-License-Identifier: Apache-2.0
"""Turns a cluster's description into the commands for each host. Starts nothing and looks nothing up."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass, field

from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.tools.launch.arguments import refused_argument
from vllm_ascend_pd.tools.launch.engine import DEFAULT_KV_PORT, DEVICES_PER_NODE, DeviceType, check_kv_port
from vllm_ascend_pd.tools.launch.hosts import Cluster, EngineEntry, Invalid, KeyPath
from vllm_ascend_pd.tools.launch.shape import Executor, ParallelSizes, ShapeError
from vllm_ascend_pd.tools.launch.transfer import ConnectorOptions, ConnectorOptionsError, EngineSide

DEFAULT_PORTS = {EngineSide.PREFILL: 8100, EngineSide.DECODE: 8200}
HEAD_PORT = 13345
"""Port at which an engine's nodes connect. It is below the kernel's ephemeral ports."""
SSH_OPTIONS = ("BatchMode=yes", "LogLevel=ERROR", "ConnectTimeout=15", "ServerAliveInterval=15")
SSH = ("ssh", "-tt", "-e", "none", *(f"-o{option}" for option in SSH_OPTIONS), "--")
"""`-tt`: a terminal on the host, which hangs up with the connection. `-e none`: ssh passes every byte on."""


@dataclass(frozen=True)
class LaunchedProcess:
    """One process on one host."""

    name: str
    host: str
    ssh: str | None
    """The destination for ssh. None: this machine."""
    command: tuple[str, ...]
    """Runs on the host."""

    @property
    def local_command(self) -> tuple[str, ...]:
        """The local command that runs `command` on the host. A shell there splits its last word again."""
        return self.command if self.ssh is None else (*SSH, self.ssh, shlex.join(self.command))


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of a cluster, which start at the same time."""

    processes: tuple[LaunchedProcess, ...]
    endpoint: str
    """The proxy's URL."""


def make_plan(cluster: Cluster, python: str, repository: str) -> LaunchPlan:
    """`python` and `repository` are the defaults of the file's keys. Raises Invalid."""
    return _Planner(cluster, cluster.python or python, cluster.repository or repository).plan()


@dataclass
class _Planner:
    cluster: Cluster
    python: str
    repository: str
    processes: list[LaunchedProcess] = field(default_factory=list)
    ports: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """By host and port: the process that uses it."""
    devices: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """By host and NPU: the engine that uses it."""

    def plan(self) -> LaunchPlan:
        cluster = self.cluster
        self.proxy_url = self._url(cluster.proxy.host, cluster.proxy.port)
        hosts = {cluster.hosts[name].address: None for decode in cluster.decode for name in decode.hosts}
        self.decode_hosts = tuple(hosts)
        self._take(cluster.proxy.host, cluster.proxy.port, "the proxy", ("proxy", "port"))
        urls: list[tuple[str, object]] = []
        for role in EngineSide:
            for i, engine in enumerate(getattr(cluster, role)):
                self._engine(role, (role.value, i), engine)
                urls.append((f"--{role}", self._url(engine.hosts[0], engine.port or DEFAULT_PORTS[role])))
        self._add_proxy(urls)
        return LaunchPlan(tuple(self.processes), self.proxy_url)

    def _engine(self, role: EngineSide, path: KeyPath, engine: EngineEntry) -> None:
        """Checks one engine and adds its processes."""
        name = f"{role}-{path[1]}"
        ray = engine.executor is Executor.RAY
        if ray and self.cluster.device == "cpu":
            raise Invalid((*path, "executor"), "vLLM's CPU backend does not run on Ray")
        try:
            shape = ParallelSizes(engine.tp, engine.pp, engine.dp, len(engine.hosts), engine.executor)
        except ShapeError as error:
            raise Invalid((*path, "hosts"), str(error)) from None
        port, head_port = engine.port or DEFAULT_PORTS[role], engine.head_port or HEAD_PORT
        self._check(role, path, engine, shape, port)
        self._take(engine.hosts[0], port, name, (*path, "port"))
        spread = ray or shape.nodes > 1
        if spread:
            self._take(engine.hosts[0], head_port, name, (*path, "head_port"))
        elif engine.head_port is not None:
            raise Invalid((*path, "head_port"), "is only for engines on several hosts")
        devices = [self._devices(name, host, shape, (*path, "devices"), engine) for host in engine.hosts]
        for rank, host in enumerate(engine.hosts):
            options = self._options(role, engine, host, devices[rank])
            if spread:
                options += [("--nodes", shape.nodes), ("--node-rank", rank), ("--head-port", head_port)]
                options += [("--head-address", self.cluster.hosts[engine.hosts[0]].address)]
            if role is EngineSide.DECODE:
                for index in shape.listeners(rank):
                    self._take(host, (engine.kv_port or DEFAULT_KV_PORT) + index, name, (*path, "kv_port"))
            variables = (f"{variable}={value}" for variable, value in engine.env.items())
            script = f"{self.repository}/scripts/launch_{role}.sh"
            words = ("env", f"PYTHON={self.python}", *variables, script, *_words(options))
            if ray:
                self._add(f"{name}-ray-{rank}", host, *words, "--ray-node")
            if rank == 0 or not ray:
                suffix = f"-node-{rank}" if shape.nodes > 1 and not ray else ""
                self._add(f"{name}{suffix}", host, *words, "--port", str(port), "--", *engine.args)

    def _check(self, role: EngineSide, path: KeyPath, engine: EngineEntry, shape: ParallelSizes, port: int) -> None:
        """Raises Invalid for what the launch script would refuse on its host."""
        for i, argument in enumerate(engine.args):
            if argument.startswith("--ssl"):
                raise Invalid((*path, "args", i), "the proxy uses plain http to engines")
            if (reason := refused_argument(argument)) is not None:
                raise Invalid((*path, "args", i), reason)
        cluster, decode = self.cluster, role is EngineSide.DECODE
        options = ConnectorOptions(
            role,
            kv_port=engine.kv_port,
            load_failure_policy=engine.load_failure_policy,
            metaservers=(self.proxy_url,) if decode else (),
            decode_hosts=() if decode else self.decode_hosts,
            metaserver_token_file=cluster.metaserver_token if decode else None,
            side_channel_key_file=cluster.side_channel_keys,
            ticket_secret_file=cluster.ticket_secret,
            extra=engine.extra,
        )
        try:
            options.config()
        except ConnectorOptionsError as error:
            raise Invalid((*path, error.key), str(error)) from None
        if not decode:
            return
        try:
            check_kv_port(DeviceType(cluster.device), engine.kv_port or DEFAULT_KV_PORT, shape, port)
        except ConnectorOptionsError as error:
            raise Invalid((*path, "kv_port"), str(error)) from None

    def _options(
        self, role: EngineSide, engine: EngineEntry, host_name: str, devices: str | None
    ) -> list[tuple[str, object]]:
        """Returns the options of the launch script on one host. None means that the option is not given."""
        cluster, host = self.cluster, self.cluster.hosts[host_name]
        options: list[tuple[str, object]] = [
            ("--model", cluster.model),
            ("--served-model-name", cluster.served_model_name),
            ("--device", cluster.device),
            ("--address", host.address),
            ("--interface", host.interface),
            ("--devices", devices),
            ("--tp", engine.tp),
            ("--pp", engine.pp),
            ("--dp", engine.dp),
            ("--executor", engine.executor.value),
            ("--engine-id", engine.engine_id),
            ("--side-channel-keys", cluster.side_channel_keys),
            ("--ticket-secret", cluster.ticket_secret),
            ("--beside", engine.beside),
            ("--env-file", engine.env_file),
        ]
        options += [("--extra", f"{name}={json.dumps(value)}") for name, value in engine.extra.items()]
        if role is EngineSide.PREFILL:
            return options + [("--decode-host", address) for address in self.decode_hosts]
        return [
            *options,
            ("--kv-port", engine.kv_port or DEFAULT_KV_PORT),
            ("--load-failure-policy", engine.load_failure_policy),
            ("--metaserver", self.proxy_url),
            ("--metaserver-token", cluster.metaserver_token),
        ]

    def _add_proxy(self, urls: list[tuple[str, object]]) -> None:
        cluster, proxy = self.cluster, self.cluster.proxy
        options = [
            ("--host", proxy.listen or cluster.hosts[proxy.host].address),
            ("--port", proxy.port),
            ("--metaserver-url", self.proxy_url),
            ("--metaserver-token-file", cluster.metaserver_token),
            *urls,
        ]
        program = (self.python, "-m", "vllm_ascend_pd.cli", "proxy")
        self._add("proxy", proxy.host, *program, *_words(options), *proxy.args)

    def _add(self, name: str, host_name: str, *command: str) -> None:
        host = self.cluster.hosts[host_name]
        ssh = None if host.local else host.ssh or host.address
        self.processes.append(LaunchedProcess(name, host_name, ssh, command))

    def _url(self, host: str, port: int) -> str:
        return f"http://{authority(self.cluster.hosts[host].address, port)}"

    def _take(self, host: str, port: int, owner: str, path: KeyPath) -> None:
        if (other := self.ports[host].get(port)) is not None:
            raise Invalid(path, f"port {port} of host {host} is already used by {other}")
        self.ports[host][port] = owner

    def _devices(self, name: str, host: str, shape: ParallelSizes, path: KeyPath, engine: EngineEntry) -> str | None:
        """Returns an engine's NPUs on one host, as a list for the launch script."""
        most = DEVICES_PER_NODE[self.cluster.device]
        if most is None:
            if engine.devices is not None:
                raise Invalid(path, "the CPU backend has no NPUs")
            return None
        taken, needed = self.devices[host], shape.per_node
        chosen = engine.devices
        if chosen is None:
            chosen = tuple(device for device in range(most) if device not in taken)[:needed]
        if len(chosen) != needed:
            have = f"{len(chosen)} are listed" if engine.devices is not None else f"{len(chosen)} of {most} are left"
            raise Invalid(path, f"{name} needs {needed} NPUs on host {host}, {have}")
        for device in chosen:
            if not 0 <= device < most:
                raise Invalid(path, f"an {self.cluster.device.upper()} server has NPUs 0 to {most - 1}, not {device}")
            if device in taken:
                raise Invalid(path, f"NPU {device} of host {host} is already used by {taken[device]}")
            taken[device] = name
        return ",".join(map(str, chosen))


def _words(options: list[tuple[str, object]]) -> list[str]:
    return [word for option, value in options if value is not None for word in (option, str(value))]
