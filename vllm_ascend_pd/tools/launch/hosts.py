# SPDX-License-Identifier: Apache-2.0
"""Reads hosts.yaml, which describes a cluster, into typed values. Errors name the file's line and the key."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from vllm_ascend_pd.core.hosts import normal_host
from vllm_ascend_pd.tools.launch.arguments import refused_proxy_argument
from vllm_ascend_pd.tools.launch.shape import Executor

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 16
_MAX_VALUES = 100_000
"""Bounds of the YAML values, because aliases can be recursive or expand without limit."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_SSH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]{0,254}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)\Z", re.IGNORECASE)

KeyPath = tuple[str | int, ...]
"""The place of a value, such as ("prefill", 0, "tp")."""


class HostsError(ValueError):
    """hosts.yaml cannot work. The message begins with the file's name and line."""


class Invalid(ValueError):
    """A value cannot work. `located` adds the file's name and line."""

    def __init__(self, path: KeyPath, reason: str) -> None:
        super().__init__(reason)
        self.path = path


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine."""

    address: str
    """IP address at which other hosts reach it."""
    ssh: str | None = None
    """Destination for `ssh`: a name of its configuration, or `user@host`. Default: the address."""
    local: bool = False
    """Whether it is this machine, which needs no ssh."""
    interface: str | None = None
    """Network interface with `address`. Default: looked up on the host."""


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine, on one host or several. `scripts/launch_prefill.sh --help` and `scripts/launch_decode.sh --help` say
    more about keys that are also options there."""

    hosts: tuple[str, ...]
    """Keys of `hosts`. Each runs an equal part of the engine, and the first one serves HTTP."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    dp: int = 1
    """Data-parallel size."""
    port: int | None = None
    """Port of its HTTP API. Default: 8100 for prefill, 8200 for decode."""
    kv_port: int | None = None
    """For decode: the first port at which prefill engines ask for its description, one port per data-parallel replica.
    Default: 19000."""
    head_port: int | None = None
    """For an engine on several hosts: a free port on the first one. Data-parallel engines also use the ports after it.
    Default: 13345."""
    devices: tuple[int, ...] | None = None
    """NPUs on each of its hosts. Default: the first ones that no earlier engine has."""
    executor: Executor = Executor.MP
    """What starts its ranks: vLLM itself, or a Ray cluster, which is started first."""
    engine_id: str | None = None
    """Its name in tickets, kept over restarts. Default: a new one at each start."""
    load_failure_policy: Literal["fail", "recompute"] | None = None
    """For decode: what happens to a request whose KV does not arrive: an error, or decode computes the prompt. Default:
    vLLM's own, an error."""
    beside: str | None = None
    """File on its hosts with the JSON entry of another connector, for example a KV pool, for a MultiConnector."""
    extra: dict[str, Any] = {}
    """Further keys of `kv_connector_extra_config`."""
    args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`, one word each."""
    env: dict[str, str] = {}
    """Environment variables. None may hold secrets."""
    env_file: str | None = None
    """File on its hosts with secrets as NAME=VALUE lines, of mode 0600."""


class Proxy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The proxy. Its engines are those of the file."""

    host: str
    """A key of `hosts`."""
    port: int = 8000
    """Port for clients and tickets."""
    listen: str | None = None
    """Address to listen on. Default: the host's."""
    args: tuple[str, ...] = ()
    """Further arguments of `vllm-ascend-pd proxy`, one word each."""


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. Paths are paths on the hosts. Files with secrets must exist on each host, with mode 0600."""

    model: str
    """Model that vLLM serves: a folder on the hosts, or a name that vLLM finds."""
    device: Literal["a2", "a3", "cpu"]
    """Atlas servers with 8 (`a2`) or 16 (`a3`) NPUs as vLLM counts them, or the CPU for trying out."""
    hosts: dict[str, Host]
    """The machines, each under a name that you choose."""
    prefill: tuple[EngineEntry, ...]
    """Prefill engines, at least one."""
    decode: tuple[EngineEntry, ...]
    """Decode engines, at least one."""
    proxy: Proxy
    """The proxy, which clients talk to."""
    name: str = "pd"
    """Name of the cluster's state folder. Two clusters that share a host need two names."""
    served_model_name: str | None = None
    """Name of the model for clients. Default: `model`."""
    python: str | None = None
    """Python with vLLM and this package. Default: the path of the one that runs here."""
    repository: str | None = None
    """Path of this repository. Default: the same path as here."""
    state: str = "~/.local/state/vllm-ascend-pd"
    """Folder on each host for logs and process ids, with one folder per cluster."""
    start_seconds: float = 1800.0
    """Longest time until all engines are healthy. They read hundreds of gigabytes of weights."""
    stop_seconds: float = 30.0
    """Time between SIGTERM and SIGKILL."""
    side_channel_keys: str | None = None
    """File made by `vllm-ascend-pd keygen`. It encrypts side channels, and admits only engines that have it."""
    ticket_secret: str | None = None
    """File made by `vllm-ascend-pd keygen --ticket-secret`. Tickets are signed with it."""
    metaserver_token: str | None = None
    """File with the bearer token. The proxy takes no ticket without it."""

    def __post_init__(self) -> None:
        # Checks that types cannot express.
        for name in ("start_seconds", "stop_seconds"):
            if not 0 < getattr(self, name) <= 86400:
                raise ValueError(f"`{name}` must be from 0 seconds to a day")


class HostsFile:
    """A parsed hosts.yaml: the cluster, and the line of each key."""

    def __init__(self, text: str, name: str = "hosts.yaml") -> None:
        """Raises HostsError."""
        self._name = name
        self._lines: dict[KeyPath, int] = {(): 1}
        self._values = 0
        try:
            node = yaml.compose(text, yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = 1 if error.problem_mark is None else error.problem_mark.line + 1
            raise HostsError(f"{name}:{line}: not YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise HostsError(f"{name}:1: not YAML: {error}") from None
        try:
            self.cluster = self._decode(self._plain(node, ()))
            _check(self.cluster)
        except Invalid as error:
            raise self.located(error) from None

    @classmethod
    def read(cls, path: Path) -> HostsFile:
        """Raises HostsError, for a file that cannot be read too."""
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise HostsError(f"{path}: larger than 1 MiB")
            return cls(content.decode(), path.name)
        except (OSError, UnicodeDecodeError) as error:
            raise HostsError(f"{path}: cannot be read: {error}") from None

    def located(self, error: Invalid) -> HostsError:
        """The same error with the line of the nearest key that the file has."""
        path = error.path
        while path not in self._lines:
            path = path[:-1]
        return HostsError(f"{self._name}:{self._lines[path]}: {key(error.path)}: {error}")

    def _plain(self, node: yaml.Node | None, path: KeyPath) -> Any:
        """Plain data of a YAML node. Notes lines, and refuses what plain data cannot hold."""
        if node is None:
            raise Invalid(path, "the file is empty")
        self._values += 1
        if len(path) > _MAX_DEPTH or self._values > _MAX_VALUES:
            raise Invalid(path[:_MAX_DEPTH], "too deep, or too much")
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value in node.value:
                name = self._scalar(key_node, path)
                if not isinstance(name, str):
                    raise Invalid(path, f"the key {name!r} is not a string")
                self._lines.setdefault((*path, name), key_node.start_mark.line + 1)
                if name in result:
                    self._lines[(*path, name)] = key_node.start_mark.line + 1
                    raise Invalid((*path, name), "is listed twice")
                result[name] = self._plain(value, (*path, name))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise Invalid(path, f"not a plain value: {error}") from None
        finally:
            loader.dispose()

    def _decode(self, plain: Any) -> Cluster:
        try:
            return msgspec.convert(plain, Cluster)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `")
            path = _path_of(place.rstrip("`"))
            if unknown := re.search(r"unknown field `(.*)`", message):
                path, message = (*path, unknown[1]), "unknown key"
            elif missing := re.search(r"missing required field `(.*)`", message):
                path, message = (*path, missing[1]), "is missing"
            raise Invalid(path, message[0].lower() + message[1:]) from None


def key(path: KeyPath) -> str:
    """The key as people write it: `prefill[0].tp`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def _path_of(text: str) -> KeyPath:
    """Returns msgspec's path, such as `$.prefill[0].tp`, as keys. Keys of dicts are `[...]` there."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", text)
    return tuple(name or int(index) for name, index in parts)


def _check(cluster: Cluster) -> None:
    """Raises Invalid for single values that a type does not rule out."""
    _match(("name",), cluster.name, _NAME, "must have only letters, digits, `_`, `.` and `-`")
    for name in ("model", "python", "repository", "state", "served_model_name"):
        _check_value((name,), getattr(cluster, name))
    if not cluster.state.startswith(("/", "~")):
        raise Invalid(("state",), f"{cluster.state!r} is another folder from everywhere: begin it with `/` or `~`")
    for name in ("side_channel_keys", "ticket_secret", "metaserver_token"):
        _check_value((name,), getattr(cluster, name))
    if not cluster.prefill or not cluster.decode:
        raise Invalid(("prefill" if not cluster.prefill else "decode",), "at least one engine is needed")
    for name, host in cluster.hosts.items():
        _check_host(("hosts", name), name, host)
    for role in ("prefill", "decode"):
        for i, engine in enumerate(getattr(cluster, role)):
            _check_engine((role, i), engine, cluster.hosts)
    proxy = cluster.proxy
    if proxy.host not in cluster.hosts:
        raise Invalid(("proxy", "host"), f"no host {proxy.host!r} in `hosts`")
    _check_addresses(cluster)
    _check_port(("proxy", "port"), proxy.port)
    _check_value(("proxy", "listen"), proxy.listen)
    for i, argument in enumerate(proxy.args):
        _check_line(("proxy", "args", i), argument)
        if (reason := refused_proxy_argument(argument, hosts_file=True)) is not None:
            raise Invalid(("proxy", "args", i), reason)


def _check_host(path: KeyPath, name: str, host: Host) -> None:
    _match(path, name, _NAME, "must have only letters, digits, `_`, `.` and `-`")
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        raise Invalid((*path, "address"), f"{host.address!r} is not an IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise Invalid((*path, "address"), f"{host.address} is not the address of a host")
    if host.ssh is not None:
        if host.local:
            raise Invalid((*path, "ssh"), "contradicts `local: true`, which uses no ssh")
        _match((*path, "ssh"), host.ssh, _SSH, "must be `user@host` or a name from ssh's configuration")
    if host.interface is not None:
        _match(
            (*path, "interface"),
            host.interface,
            re.compile(r"[A-Za-z0-9_.:@-]{1,15}"),
            "must be the name of an interface",
        )


def _check_addresses(cluster: Cluster) -> None:
    """NPUs and ports are assigned per host, so two hosts must not be the same machine."""
    addresses = {name: ipaddress.ip_address(normal_host(host.address)) for name, host in cluster.hosts.items()}
    names: dict[object, str] = {}
    for name, address in addresses.items():
        if (other := names.setdefault(address, name)) != name:
            raise Invalid(
                ("hosts", name, "address"), f"{address} is already the address of {other}: list each machine once"
            )
    used = {cluster.proxy.host, *(name for engine in (*cluster.prefill, *cluster.decode) for name in engine.hosts)}
    loopback = sorted(name for name in used if addresses[name].is_loopback)
    # Without NPUs, one machine may stand in for several hosts.
    if loopback and len(used) > (len(loopback) if cluster.device == "cpu" else 1):
        name = loopback[0]
        raise Invalid(
            ("hosts", name, "address"),
            f"{addresses[name]} is a loopback address: other hosts cannot reach {name} there",
        )


def _check_engine(path: KeyPath, engine: EngineEntry, hosts: dict[str, Host]) -> None:
    if not engine.hosts:
        raise Invalid((*path, "hosts"), "at least one host is needed")
    for i, name in enumerate(engine.hosts):
        if name not in hosts:
            raise Invalid((*path, "hosts", i), f"no host {name!r} in `hosts`")
    if len(set(engine.hosts)) < len(engine.hosts):
        raise Invalid((*path, "hosts"), "lists a host twice")
    for size in ("tp", "pp", "dp"):
        if not 1 <= getattr(engine, size) <= 4096:
            raise Invalid((*path, size), "must be from 1 to 4096")
    for name in ("port", "kv_port", "head_port"):
        if (port := getattr(engine, name)) is not None:
            _check_port((*path, name), port)
    if engine.devices is not None and (
        len(set(engine.devices)) < len(engine.devices) or any(device < 0 for device in engine.devices)
    ):
        raise Invalid((*path, "devices"), "must be different numbers from 0 on")
    for i, argument in enumerate(engine.args):
        _check_line((*path, "args", i), argument)
    for name in ("engine_id", "beside", "env_file"):
        _check_value((*path, name), getattr(engine, name))
    for name, value in engine.env.items():
        _match((*path, "env", name), name, _VARIABLE, "must be the name of a variable")
        if _SECRET_VARIABLE.search(name):
            raise Invalid(
                (*path, "env", name),
                "looks like a secret, and every user can read command lines: put it into a file of mode 0600 on the "
                "host, and name the file as env_file",
            )
        _check_line((*path, "env", name), value)


def _check_port(path: KeyPath, port: int) -> None:
    if not 1 <= port <= 65535:
        raise Invalid(path, f"{port} is not a port")


def _match(path: KeyPath, value: str, pattern: re.Pattern[str], what: str) -> None:
    if not pattern.fullmatch(value):
        raise Invalid(path, f"{value[:80]!r}: {what}")


def _check_value(path: KeyPath, value: str | None) -> None:
    """Checks the value of an option."""
    _check_line(path, value)
    if value is not None and (not value or value.startswith("-")):
        raise Invalid(path, f"{value!r} is empty or begins with a dash")


def _check_line(path: KeyPath, value: str | None) -> None:
    if value is not None and not value.isprintable():
        raise Invalid(path, "must be one printable line")
