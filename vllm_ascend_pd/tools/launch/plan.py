# SPDX-License-Identifier: Apache-2.0
"""Turns a cluster's description into the commands for each host. Starts nothing and looks nothing up."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.tools.launch.engine import EngineOptions, EngineSide, refused_argument
from vllm_ascend_pd.tools.launch.hosts import Cluster, EngineEntry, HostsError, KeyPath
from vllm_ascend_pd.tools.launch.shape import (
    DEFAULT_KV_PORT,
    HEAD_PORT,
    DeviceType,
    EngineOptionsError,
    Executor,
    ParallelSizes,
)

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
    """`python` and `repository` are the defaults of the file's keys. Raises HostsError."""
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
        self.decode_hosts = list(hosts)
        self._take(cluster.proxy.host, cluster.proxy.port, "the proxy", ("proxy", "port"))
        urls: list[tuple[str, object]] = []
        for role in EngineSide:
            for i, engine in enumerate(getattr(cluster, role)):
                self._engine(role, (role.value, i), engine)
                urls.append((f"--{role}", self._url(engine.hosts[0], engine.port or role.default_port)))
        self._add_proxy(urls)
        return LaunchPlan(tuple(self.processes), self.proxy_url)

    def _engine(self, role: EngineSide, path: KeyPath, engine: EngineEntry) -> None:
        """Checks one engine and adds its processes."""
        name = f"{role}-{path[1]}"
        ray = engine.executor is Executor.RAY
        if ray and self.cluster.device is DeviceType.CPU:
            raise HostsError((*path, "executor"), "vLLM's CPU backend does not run on Ray")
        spread = ray or len(engine.hosts) > 1
        if not spread and engine.head_port is not None:
            raise HostsError((*path, "head_port"), "is only for engines on several hosts")
        options = self._options(role, engine)
        try:
            shape = options.shape
            self._check_arguments(path, engine)
            options.transfer_config()
        except EngineOptionsError as error:
            raise HostsError((*path, error.key), str(error)) from None
        self._take(engine.hosts[0], options.http_port, name, (*path, "port"))
        if spread:
            self._take(engine.hosts[0], options.head_port, name, (*path, "head_port"))
        devices = [self._devices(name, host, shape, (*path, "devices"), engine) for host in engine.hosts]
        for rank, host_name in enumerate(engine.hosts):
            host = self.cluster.hosts[host_name]
            if role is EngineSide.DECODE:
                for index in shape.listeners(rank):
                    self._take(host_name, (engine.kv_port or DEFAULT_KV_PORT) + index, name, (*path, "kv_port"))
            here = replace(
                options, address=host.address, interface=host.interface, devices=devices[rank], node_rank=rank
            )
            if ray:
                self._add_engine(f"{name}-ray-{rank}", host_name, replace(here, ray_node=True), engine)
            if rank == 0 or not ray:
                suffix = f"-node-{rank}" if shape.nodes > 1 and not ray else ""
                self._add_engine(f"{name}{suffix}", host_name, here, engine)

    def _check_arguments(self, path: KeyPath, engine: EngineEntry) -> None:
        """Raises HostsError for what the launch script would refuse on its host."""
        for i, argument in enumerate(engine.args):
            if argument.startswith("--ssl"):
                raise HostsError((*path, "args", i), "the proxy uses plain http to engines")
            if (reason := refused_argument(argument)) is not None:
                raise HostsError((*path, "args", i), reason)

    def _options(self, role: EngineSide, engine: EngineEntry) -> EngineOptions:
        """Returns the options of an engine's launch script that are the same on all its hosts."""
        cluster, decode = self.cluster, role is EngineSide.DECODE
        same = ("port", "tp", "pp", "dp", "executor", "kv_port", "load_failure_policy")
        return EngineOptions(
            role=role,
            model=cluster.model,
            device=cluster.device,
            served_model_name=cluster.served_model_name,
            nodes=len(engine.hosts),
            head_address=self.cluster.hosts[engine.hosts[0]].address if len(engine.hosts) > 1 else None,
            head_port=engine.head_port or HEAD_PORT,
            metaserver=[self.proxy_url] if decode else None,
            metaserver_token=cluster.metaserver_token if decode else None,
            decode_host=None if decode else self.decode_hosts,
            side_channel_keys=cluster.side_channel_keys,
            ticket_secret=cluster.ticket_secret,
            beside=None if engine.beside is None else Path(engine.beside),
            extra=[f"{name}={json.dumps(value)}" for name, value in engine.extra.items()] or None,
            env_file=None if engine.env_file is None else Path(engine.env_file),
            **{name: getattr(engine, name) for name in same},
        )

    def _add_engine(self, name: str, host_name: str, options: EngineOptions, engine: EngineEntry) -> None:
        variables = (f"{variable}={value}" for variable, value in engine.env.items())
        script = f"{self.repository}/scripts/launch_{options.role}.sh"
        words = ("env", f"PYTHON={self.python}", *variables, script, *options.script_words())
        self._add(name, host_name, *words, "--", *engine.args)

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
            raise HostsError(path, f"port {port} of host {host} is already used by {other}")
        self.ports[host][port] = owner

    def _devices(self, name: str, host: str, shape: ParallelSizes, path: KeyPath, engine: EngineEntry) -> str | None:
        """Returns an engine's NPUs on one host, as a list for the launch script."""
        most = self.cluster.device.per_node
        if most is None:
            if engine.devices is not None:
                raise HostsError(path, "the CPU backend has no NPUs")
            return None
        taken, needed = self.devices[host], shape.per_node
        chosen = engine.devices
        if chosen is None:
            chosen = tuple(device for device in range(most) if device not in taken)[:needed]
        if len(chosen) != needed:
            have = f"{len(chosen)} are listed" if engine.devices is not None else f"{len(chosen)} of {most} are left"
            raise HostsError(path, f"{name} needs {needed} NPUs on host {host}, {have}")
        for device in chosen:
            if not 0 <= device < most:
                raise HostsError(
                    path, f"an {self.cluster.device.upper()} server has NPUs 0 to {most - 1}, not {device}"
                )
            if device in taken:
                raise HostsError(path, f"NPU {device} of host {host} is already used by {taken[device]}")
            taken[device] = name
        return ",".join(map(str, chosen))


def _words(options: list[tuple[str, object]]) -> list[str]:
    return [word for option, value in options if value is not None for word in (option, str(value))]
