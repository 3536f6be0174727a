# SPDX-License-Identifier: Apache-2.0
"""Reads hosts.yaml, which describes a cluster, into typed values. Errors name the file's line and the key."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from vllm_ascend_pd.core.hosts import normal_host
from vllm_ascend_pd.tools.launch.shape import Executor

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 16
_MAX_VALUES = 100_000
"""Bounds of the YAML values, because aliases can be recursive or expand without limit."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_SSH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]{0,254}")
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)\Z", re.IGNORECASE)
_REMOVED = {
    "name": "clusters need no name, because the launcher keeps no files about them",
    "state": "logs go to the launcher's standard output, and no process ids are kept",
    "start_seconds": "the launcher waits until the cluster serves, a process ends, or you press Ctrl-C",
    "stop_seconds": "the launcher waits 30 s for processes to end after Ctrl-C",
}
"""Keys of the whole file that are gone, and what is done instead."""
_PROXYS = {
    "--prefill": "use prefill",
    "--decode": "use decode",
    "--host": "use proxy.listen",
    "--port": "use proxy.port",
    "--metaserver-url": "use hosts",
    "--metaserver-token-file": "use metaserver_token",
    "--help": "run `vllm-ascend-pd proxy --help`",
    "--version": "run `vllm-ascend-pd --version`",
}
"""Options of `vllm-ascend-pd proxy` that `proxy.args` may not have, and what to do instead."""

KeyPath = tuple[str | int, ...]
"""The place of a value, such as ("prefill", 0, "tp")."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]


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

    hosts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Keys of `hosts`. Each runs an equal part of the engine, and the first one serves HTTP."""
    tp: Size = 1
    """Tensor-parallel size."""
    pp: Size = 1
    """Pipeline-parallel size."""
    dp: Size = 1
    """Data-parallel size."""
    port: Port | None = None
    """Port of its HTTP API. Default: 8100 for prefill, 8200 for decode."""
    kv_port: Port | None = None
    """For decode: the first port at which prefill engines ask for its description, one port per data-parallel replica.
    Default: 19000."""
    head_port: Port | None = None
    """For an engine on several hosts: a free port on the first one. Data-parallel engines also use the ports after it.
    Default: 13345."""
    devices: tuple[int, ...] | None = None
    """NPUs on each of its hosts. Default: the first ones that no earlier engine has."""
    executor: Executor = Executor.MP
    """What starts its ranks: vLLM itself, or a Ray cluster, which is started with it."""
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
    port: Port = 8000
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
    prefill: Annotated[tuple[EngineEntry, ...], msgspec.Meta(min_length=1)]
    """Prefill engines, at least one."""
    decode: Annotated[tuple[EngineEntry, ...], msgspec.Meta(min_length=1)]
    """Decode engines, at least one."""
    proxy: Proxy
    """The proxy, which clients talk to."""
    served_model_name: str | None = None
    """Name of the model for clients. Default: `model`."""
    python: str | None = None
    """Python with vLLM and this package. Default: the path of the one that runs here."""
    repository: str | None = None
    """Path of this repository. Default: the same path as here."""
    side_channel_keys: str | None = None
    """File made by `vllm-ascend-pd keygen`. It encrypts side channels, and admits only engines that have it."""
    ticket_secret: str | None = None
    """File made by `vllm-ascend-pd keygen --ticket-secret`. Tickets are signed with it."""
    metaserver_token: str | None = None
    """File with the bearer token. The proxy takes no ticket without it."""


class HostsFile:
    """A parsed hosts.yaml: the cluster, and the line of each key."""

    def __init__(self, text: str, name: str = "hosts.yaml") -> None:
        """Raises HostsError."""
        self._name = name
        self._lines: dict[KeyPath, int] = {(): 1}
        self._values = 0
        self._loader = yaml.SafeLoader("")
        try:
            node = yaml.compose(text, yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
            self.cluster = _decode(self._plain(node, ()))
            _check(self.cluster)
        except Invalid as error:
            raise self.located(error) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = 1 if mark is None else mark.line + 1
            raise HostsError(f"{name}:{line}: not YAML: {getattr(error, 'problem', error)}") from None

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
        return HostsError(f"{self._name}:{self._lines[path]}: {_key(error.path)}: {error}")

    def _plain(self, node: yaml.Node | None, path: KeyPath) -> Any:
        """Plain data of a YAML node. Notes lines, and refuses what plain data cannot hold."""
        if node is None:
            raise Invalid(path, "the file is empty")
        self._values += 1
        if len(path) > _MAX_DEPTH or self._values > _MAX_VALUES:
            raise Invalid(path[:_MAX_DEPTH], "too deep, or too much")
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, i)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node, path)
        result: dict[str, Any] = {}
        for key_node, value in node.value:
            name = self._scalar(key_node, path)
            if not isinstance(name, str):
                raise Invalid(path, f"the key {name!r} is not a string")
            self._lines[(*path, name)] = key_node.start_mark.line + 1
            if name in result:
                raise Invalid((*path, name), "is listed twice")
            result[name] = self._plain(value, (*path, name))
        return result

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise Invalid(path, f"not a plain value: {error}") from None
        if isinstance(value, str) and not value.isprintable():
            raise Invalid(path, "must be one printable line")
        return value


def _key(path: KeyPath) -> str:
    """The key as people write it: `prefill[0].tp`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def _decode(plain: Any) -> Cluster:
    try:
        return msgspec.convert(plain, Cluster)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        # The place is such as `$.prefill[0].tp`. Keys of dicts are `[...]` there.
        path: KeyPath = tuple(name or int(index) for name, index in re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", place))
        if unknown := re.search(r"unknown field `(.*)`", message):
            removed = None if path else _REMOVED.get(unknown[1])
            path, message = (*path, unknown[1]), "unknown key" if removed is None else f"was removed: {removed}"
        elif missing := re.search(r"missing required field `(.*)`", message):
            path, message = (*path, missing[1]), "is missing"
        raise Invalid(path, message[0].lower() + message[1:]) from None


def _check(cluster: Cluster) -> None:
    """Raises Invalid for single values that a type does not rule out."""
    _check_values((), cluster)
    _check_values(("proxy",), cluster.proxy)
    for name, host in cluster.hosts.items():
        _check_host(("hosts", name), name, host)
    for role in ("prefill", "decode"):
        for i, engine in enumerate(getattr(cluster, role)):
            _check_engine((role, i), engine, cluster.hosts)
    if cluster.proxy.host not in cluster.hosts:
        raise Invalid(("proxy", "host"), f"no host {cluster.proxy.host!r} in `hosts`")
    _check_addresses(cluster)
    for i, argument in enumerate(cluster.proxy.args):
        option = argument.partition("=")[0]
        if option in _PROXYS:
            raise Invalid(("proxy", "args", i), f"{option} is not for proxy.args: {_PROXYS[option]}")
        if option.startswith(("--tls-", "--metaserver-")):
            reason = f"{option} is not supported here: engines post tickets to http:// and proxy.port"
            raise Invalid(("proxy", "args", i), reason)


def _check_values(path: KeyPath, struct: msgspec.Struct) -> None:
    """Checks the strings of `struct`, which become values of options."""
    for name, value in msgspec.structs.asdict(struct).items():
        if isinstance(value, str) and (not value or value.startswith("-")):
            raise Invalid((*path, name), f"{value!r} is empty or begins with a dash")


def _check_host(path: KeyPath, name: str, host: Host) -> None:
    if not _NAME.fullmatch(name):
        raise Invalid(path, "must have only letters, digits, `_`, `.` and `-`")
    if host.ssh is not None and not _SSH.fullmatch(host.ssh):
        raise Invalid((*path, "ssh"), f"{host.ssh!r} is not `user@host` or a name of ssh's configuration")
    if host.interface is not None and not _INTERFACE.fullmatch(host.interface):
        raise Invalid((*path, "interface"), f"{host.interface!r} is not the name of an interface")
    _check_values(path, host)
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        raise Invalid((*path, "address"), f"{host.address!r} is not an IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise Invalid((*path, "address"), f"{host.address} is not the address of a host")
    if host.local and host.ssh is not None:
        raise Invalid((*path, "ssh"), "contradicts `local: true`, which uses no ssh")


def _check_addresses(cluster: Cluster) -> None:
    """NPUs and ports are assigned per host, so two hosts must not be the same machine."""
    addresses = {name: ipaddress.ip_address(normal_host(host.address)) for name, host in cluster.hosts.items()}
    names: dict[object, str] = {}
    for name, address in addresses.items():
        if (other := names.setdefault(address, name)) != name:
            reason = f"{address} is already the address of {other}: list each machine once"
            raise Invalid(("hosts", name, "address"), reason)
    used = {cluster.proxy.host, *(name for engine in (*cluster.prefill, *cluster.decode) for name in engine.hosts)}
    loopback = sorted(name for name in used if addresses[name].is_loopback)
    # Without NPUs, one machine may stand in for several hosts.
    if loopback and len(used) > (len(loopback) if cluster.device == "cpu" else 1):
        name = loopback[0]
        reason = f"{addresses[name]} is a loopback address: other hosts cannot reach {name} there"
        raise Invalid(("hosts", name, "address"), reason)


def _check_engine(path: KeyPath, engine: EngineEntry, hosts: dict[str, Host]) -> None:
    _check_values(path, engine)
    for i, name in enumerate(engine.hosts):
        if name not in hosts:
            raise Invalid((*path, "hosts", i), f"no host {name!r} in `hosts`")
    if len(set(engine.hosts)) < len(engine.hosts):
        raise Invalid((*path, "hosts"), "lists a host twice")
    for name in engine.env:
        if not _VARIABLE.fullmatch(name):
            raise Invalid((*path, "env", name), "must be the name of a variable")
        if _SECRET_VARIABLE.search(name):
            raise Invalid(
                (*path, "env", name),
                "looks like a secret, and every user can read command lines: put it into a file of mode 0600 on the "
                "host, and name the file as env_file",
            )
