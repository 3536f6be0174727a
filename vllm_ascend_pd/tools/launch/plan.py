# SPDX-License-Identifier: Apache-2.0
"""Turns a cluster's description into the commands for each host. Starts nothing and looks nothing up."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass, field

from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.tools.launch.arguments import refused_argument
from vllm_ascend_pd.tools.launch.engine import DEFAULT_KV_PORT, DEVICES_PER_NODE, MOONCAKE_PORTS
from vllm_ascend_pd.tools.launch.hosts import Cluster, EngineEntry, Host, Invalid, KeyPath
from vllm_ascend_pd.tools.launch.shape import Executor, ParallelSizes, ShapeError
from vllm_ascend_pd.tools.launch.transfer import ConnectorOptions, ConnectorOptionsError, EngineSide

DEFAULT_PORTS = {"prefill": 8100, "decode": 8200}
HEAD_PORT = 13345
"""Port at which an engine's nodes connect. It is below the kernel's ephemeral ports."""


@dataclass(frozen=True)
class LaunchedProcess:
    """One process on one host."""

    name: str
    host: str
    ssh: str | None
    """The destination for ssh. None: this machine."""
    command: tuple[str, ...]
    """Runs on the host."""
    ready: str | None
    """URL that answers once the process serves. None: the process is ready at once."""


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of a cluster, in the order of their start."""

    stages: tuple[tuple[LaunchedProcess, ...], ...]
    """Stages start one after another. The processes of a stage start together."""
    endpoint: str
    """The proxy's URL."""
    agent: tuple[str, ...]
    """The command that runs vllm_ascend_pd/tools/launch/node.py on each host."""
    folder: str
    """Holds logs and process ids on each host. May begin with `~`."""
    start_seconds: float
    """Timeout until all processes are ready."""
    stop_seconds: float
    """Time between SIGTERM and SIGKILL."""

    @property
    def processes(self) -> tuple[LaunchedProcess, ...]:
        return tuple(process for stage in self.stages for process in stage)

    def run(self, process: LaunchedProcess) -> list[str]:
        """Returns the command of the agent that starts and watches `process`."""
        ready = [] if process.ready is None else ["--ready", process.ready]
        return [*self._agent("run", process), *ready, "--", *process.command]

    def stop(self, process: LaunchedProcess) -> list[str]:
        """Returns the command that stops `process`, whichever agent has started it."""
        return self._agent("stop", process)

    def _agent(self, verb: str, process: LaunchedProcess) -> list[str]:
        place = ["--folder", self.folder, "--name", process.name, "--grace", f"{self.stop_seconds:g}"]
        return [*self.agent, verb, *place]


def reach(process: LaunchedProcess, command: list[str]) -> list[str]:
    """Returns the local command that runs `command` on the host of `process`.

    ssh passes its arguments to a shell on the host, so each word is quoted for a shell.
    """
    if process.ssh is None:
        return command
    options = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4"]
    return [
        "ssh",
        "-T",
        *(word for option in options for word in ("-o", option)),
        "--",
        process.ssh,
        shlex.join(command),
    ]


def make_plan(cluster: Cluster, python: str, repository: str) -> LaunchPlan:
    """`python` and `repository` are the defaults of the file's keys. Raises Invalid."""
    return _Planner(cluster, cluster.python or python, cluster.repository or repository).plan()


@dataclass
class _Planner:
    cluster: Cluster
    python: str
    repository: str
    ports: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """By host and port: the process that uses it."""
    devices: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    def plan(self) -> LaunchPlan:
        cluster = self.cluster
        proxy_host = cluster.hosts[cluster.proxy.host]
        self.proxy_url = _url(proxy_host.address, cluster.proxy.port)
        hosts = {cluster.hosts[name].address: None for decode in cluster.decode for name in decode.hosts}
        self.decode_hosts = tuple(hosts)
        self._take(cluster.proxy.host, cluster.proxy.port, "the proxy", ("proxy", "port"))
        ray: list[LaunchedProcess] = []
        engines: list[LaunchedProcess] = []
        urls: dict[str, list[str]] = {"prefill": [], "decode": []}
        for role in ("prefill", "decode"):
            for i, engine in enumerate(getattr(cluster, role)):
                urls[role].append(_url(cluster.hosts[engine.hosts[0]].address, self._port(role, engine)))
                nodes, processes = self._engine(role, i, engine)
                ray += nodes
                engines += processes
        stages = [stage for stage in (ray, engines, [self._proxy(proxy_host, urls)]) if stage]
        return LaunchPlan(
            stages=tuple(map(tuple, stages)),
            endpoint=self.proxy_url,
            agent=(self.python, "-m", "vllm_ascend_pd.tools.launch.node"),
            folder=f"{cluster.state.rstrip('/')}/{cluster.name}",
            start_seconds=cluster.start_seconds,
            stop_seconds=cluster.stop_seconds,
        )

    def _port(self, role: str, engine: EngineEntry) -> int:
        return engine.port or DEFAULT_PORTS[role]

    def _engine(
        self, role: str, index: int, engine: EngineEntry
    ) -> tuple[list[LaunchedProcess], list[LaunchedProcess]]:
        """Returns the Ray nodes that the engine needs, and vLLM's processes."""
        path: KeyPath = (role, index)
        name = f"{role}-{index}"
        ray = engine.executor is Executor.RAY
        if ray and self.cluster.device == "cpu":
            raise Invalid((*path, "executor"), "vLLM's CPU backend does not run on Ray")
        try:
            shape = ParallelSizes(engine.tp, engine.pp, engine.dp, len(engine.hosts), engine.executor)
        except ShapeError as error:
            raise Invalid((*path, "hosts"), str(error)) from None
        self._check_arguments(path, engine, role)
        self._check_extra(path, engine, EngineSide(role))
        port, head_port = self._port(role, engine), engine.head_port or HEAD_PORT
        head = self.cluster.hosts[engine.hosts[0]]
        self._take(engine.hosts[0], port, name, (*path, "port"))
        if shape.nodes > 1 or ray:
            self._take(engine.hosts[0], head_port, name, (*path, "head_port"))
        elif engine.head_port is not None:
            raise Invalid((*path, "head_port"), "is only for engines on several hosts")
        devices = [self._devices(name, host, shape, (*path, "devices"), engine) for host in engine.hosts]
        if role == "decode":
            for rank, host in enumerate(engine.hosts):
                self._take_kv_ports(host, engine, shape.listeners(rank), name, path)
        starts, processes = [], []
        for rank, host_name in enumerate(engine.hosts):
            suffix = f"-node-{rank}" if shape.nodes > 1 else ""
            options = self._options(role, engine, host_name, devices[rank])
            if shape.nodes > 1 or ray:
                options += ["--nodes", str(shape.nodes), "--node-rank", str(rank)]
                options += ["--head-address", head.address, "--head-port", str(head_port)]
            if ray:
                ready = f"tcp://{authority(head.address, head_port)}" if rank == 0 else None
                command = self._command(role, engine, [*options, "--ray-node"])
                starts.append(self._process(f"{name}-ray-{rank}", host_name, command, ready))
                if rank:
                    continue
                suffix = ""
            serve = [*options, "--port", str(port), "--", *engine.args]
            health = f"{_url(head.address, port)}/health" if rank == 0 else None
            processes.append(self._process(f"{name}{suffix}", host_name, self._command(role, engine, serve), health))
        return starts, processes

    def _options(self, role: str, engine: EngineEntry, host_name: str, devices: str | None) -> list[str]:
        """Returns the options of the launch script on one host."""
        cluster, host = self.cluster, self.cluster.hosts[host_name]
        given: list[tuple[str, object]] = [
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
        given += [("--extra", f"{name}={json.dumps(value)}") for name, value in engine.extra.items()]
        if role == "decode":
            given += [
                ("--kv-port", engine.kv_port or DEFAULT_KV_PORT),
                ("--load-failure-policy", engine.load_failure_policy),
                ("--metaserver", self.proxy_url),
                ("--metaserver-token", cluster.metaserver_token),
            ]
        else:
            given += [("--decode-host", address) for address in self.decode_hosts]
        return [word for option, value in given if value is not None for word in (option, str(value))]

    def _command(self, role: str, engine: EngineEntry, words: list[str]) -> tuple[str, ...]:
        variables = [f"{name}={value}" for name, value in engine.env.items()]
        return ("env", f"PYTHON={self.python}", *variables, f"{self.repository}/scripts/launch_{role}.sh", *words)

    def _proxy(self, host: Host, urls: dict[str, list[str]]) -> LaunchedProcess:
        cluster, proxy = self.cluster, self.cluster.proxy
        words = ["env", f"PYTHON={self.python}", f"{self.repository}/scripts/launch_proxy.sh"]
        words += ["--address", host.address, "--port", str(proxy.port)]
        for option, value in (
            ("--listen", proxy.listen),
            ("--ticket-secret", cluster.ticket_secret),
            ("--metaserver-token", cluster.metaserver_token),
        ):
            words += [] if value is None else [option, value]
        for role in ("prefill", "decode"):
            words += [word for url in urls[role] for word in (f"--{role}", url)]
        command = (*words, "--", *proxy.args)
        return self._process("proxy", proxy.host, command, f"{self.proxy_url}/health")

    def _process(self, name: str, host_name: str, command: tuple[str, ...], ready: str | None) -> LaunchedProcess:
        host = self.cluster.hosts[host_name]
        return LaunchedProcess(name, host_name, None if host.local else host.ssh or host.address, command, ready)

    def _check_arguments(self, path: KeyPath, engine: EngineEntry, role: str) -> None:
        for i, argument in enumerate(engine.args):
            if argument.startswith("--ssl"):
                raise Invalid((*path, "args", i), "the proxy and the health checks use plain http to engines")
            if (reason := refused_argument(argument)) is not None:
                raise Invalid((*path, "args", i), reason)
        for name in ("kv_port", "load_failure_policy"):
            if role == "prefill" and getattr(engine, name) is not None:
                raise Invalid((*path, name), "is only for decode")

    def _check_extra(self, path: KeyPath, engine: EngineEntry, role: EngineSide) -> None:
        cluster, of_decode = self.cluster, role is EngineSide.DECODE
        transfer = ConnectorOptions(
            role,
            metaservers=(self.proxy_url,) if of_decode else (),
            decode_hosts=() if of_decode else self.decode_hosts,
            metaserver_token_file=cluster.metaserver_token if of_decode else None,
            side_channel_key_file=cluster.side_channel_keys,
            ticket_secret_file=cluster.ticket_secret,
            extra=engine.extra,
        )
        try:
            transfer.config()
        except ConnectorOptionsError as error:
            raise Invalid((*path, "extra"), str(error)) from None

    def _take(self, host: str, port: int, owner: str, path: KeyPath) -> None:
        if (other := self.ports[host].get(port)) is not None:
            raise Invalid(path, f"port {port} of host {host} is already used by {other}")
        self.ports[host][port] = owner

    def _take_kv_ports(self, host: str, engine: EngineEntry, listeners: range, name: str, path: KeyPath) -> None:
        path = (*path, "kv_port")
        first = engine.kv_port or DEFAULT_KV_PORT
        mooncake = MOONCAKE_PORTS[self.cluster.device]
        for index in listeners:
            port = first + index
            if port > 65535:
                raise Invalid(path, f"too few ports below 65536 for {engine.dp} data-parallel replicas")
            if port in mooncake:
                raise Invalid(path, f"{port}: Mooncake listens on ports {mooncake.start} to {mooncake.stop - 1}")
            self._take(host, port, name, path)

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
            if device >= most:
                raise Invalid(path, f"an {self.cluster.device.upper()} server has NPUs 0 to {most - 1}, not {device}")
            if device in taken:
                raise Invalid(path, f"NPU {device} of host {host} is already used by {taken[device]}")
            taken[device] = name
        return ",".join(map(str, chosen))


def _url(address: str, port: int) -> str:
    return f"http://{authority(address, port)}"
