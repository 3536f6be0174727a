# SPDX-License-Identifier: Apache-2.0
"""Reads hosts.yaml, which describes a cluster, into typed values. Errors name the key."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from vllm_ascend_pd.core.hosts import normal_host
from vllm_ascend_pd.tools.launch.shape import DeviceType, Executor

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000
"""Bounds the values of the file, because aliases expand without limit."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)\Z", re.IGNORECASE)
_REMOVED = {
    "name": "clusters need no name, because the launcher keeps no files about them",
    "state": "logs go to the launcher's standard output, and no process ids are kept",
    "start_seconds": "the launcher waits until the cluster serves, a process ends, or you press Ctrl-C",
    "stop_seconds": "the launcher waits 30 s for processes to end after Ctrl-C",
}
"""Keys of the whole file that are gone, and what is done instead."""
_REMOVED_OF_ENGINES = {"engine_id": "vLLM makes a new one at each start, so that a restarted engine is not the old one"}
_PROXYS = {
    "--prefill": "use prefill",
    "--decode": "use decode",
    "--host": "use proxy.listen",
    "--port": "use proxy.port",
    "--metaserver-url": "use hosts",
    "--metaserver-token-file": "use metaserver_token",
}
"""Options of `vllm-ascend-pd proxy` that `proxy.args` may not have, and what to do instead."""

KeyPath = tuple[str | int, ...]
"""The place of a value, such as ("prefill", 0, "tp")."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class HostsError(ValueError):
    """hosts.yaml cannot work. The message begins with the key, as people write it: `prefill[0].tp`."""

    def __init__(self, path: KeyPath, reason: str) -> None:
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        super().__init__(f"{key}: {reason}" if key else reason)


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
    device: DeviceType
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


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Refuses keys that are listed twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value]
        for place, key in enumerate(keys):
            if any(key.value == other.value for other in keys[:place]):
                raise yaml.MarkedYAMLError(problem=f"{key.value} is listed twice", problem_mark=key.start_mark)
        return dict(super().construct_mapping(node, deep))


def read_hosts(path: Path) -> Cluster:
    """Raises HostsError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise HostsError((), "larger than 1 MiB")
        return parse_hosts(content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError((), f"cannot be read: {error}") from None


def parse_hosts(text: str) -> Cluster:
    """Raises HostsError."""
    try:
        plain = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise HostsError((), f"{line}{getattr(error, 'problem', None) or error}") from None
    try:
        for number, (path, value) in enumerate(_values(plain, ())):
            if number > _MAX_VALUES:
                raise HostsError((), "too many values")
            if isinstance(value, str) and not value.isprintable():
                raise HostsError(path, "must be one printable line")
    except RecursionError:
        raise HostsError((), "a value is too deep, or within itself") from None
    cluster = _decode(plain)
    _check(cluster)
    return cluster


def _values(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yields all values below a value, and where they are."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _values(inner, (*path, key))


def _decode(plain: Any) -> Cluster:
    try:
        return msgspec.convert(plain, Cluster)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        # The place is such as `$.prefill[0].tp`. Keys of dicts are `[...]` there.
        path: KeyPath = tuple(name or int(index) for name, index in re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", place))
        if unknown := re.search(r"unknown field `(.*)`", message):
            removed = (_REMOVED_OF_ENGINES if path else _REMOVED).get(unknown[1])
            path, message = (*path, unknown[1]), "unknown key" if removed is None else f"was removed: {removed}"
        elif missing := re.search(r"missing required field `(.*)`", message):
            path, message = (*path, missing[1]), "is missing"
        raise HostsError(path, message[0].lower() + message[1:]) from None


def _check(cluster: Cluster) -> None:
    """Raises HostsError for single values that a type does not rule out."""
    _check_values((), cluster)
    _check_values(("proxy",), cluster.proxy)
    for name, host in cluster.hosts.items():
        _check_host(("hosts", name), host)
    for role in ("prefill", "decode"):
        for i, engine in enumerate(getattr(cluster, role)):
            _check_engine((role, i), engine, cluster.hosts)
    if cluster.proxy.host not in cluster.hosts:
        raise HostsError(("proxy", "host"), f"no host {cluster.proxy.host!r} in `hosts`")
    _check_addresses(cluster)
    for i, argument in enumerate(cluster.proxy.args):
        option = argument.partition("=")[0]
        if option in _PROXYS:
            raise HostsError(("proxy", "args", i), f"{option} is not for proxy.args: {_PROXYS[option]}")
        if option.startswith(("--tls-", "--metaserver-")):
            reason = f"{option} is not supported here: engines post tickets to http:// and proxy.port"
            raise HostsError(("proxy", "args", i), reason)


def _check_values(path: KeyPath, struct: msgspec.Struct) -> None:
    """Checks the strings of `struct`, which become values of options."""
    for name, value in msgspec.structs.asdict(struct).items():
        if isinstance(value, str) and (not value or value.startswith("-")):
            raise HostsError((*path, name), f"{value!r} is empty or begins with a dash")


def _check_host(path: KeyPath, host: Host) -> None:
    _check_values(path, host)
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        raise HostsError((*path, "address"), f"{host.address!r} is not an IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise HostsError((*path, "address"), f"{host.address} is not the address of a host")
    if host.local and host.ssh is not None:
        raise HostsError((*path, "ssh"), "contradicts `local: true`, which uses no ssh")


def _check_addresses(cluster: Cluster) -> None:
    """NPUs and ports are assigned per host, so two hosts must not be the same machine."""
    addresses = {name: ipaddress.ip_address(normal_host(host.address)) for name, host in cluster.hosts.items()}
    names: dict[object, str] = {}
    for name, address in addresses.items():
        if (other := names.setdefault(address, name)) != name:
            reason = f"{address} is already the address of {other}: list each machine once"
            raise HostsError(("hosts", name, "address"), reason)
    used = {cluster.proxy.host, *(name for engine in (*cluster.prefill, *cluster.decode) for name in engine.hosts)}
    loopback = sorted(name for name in used if addresses[name].is_loopback)
    # Without NPUs, one machine may stand in for several hosts.
    if loopback and len(used) > (len(loopback) if cluster.device is DeviceType.CPU else 1):
        name = loopback[0]
        reason = f"{addresses[name]} is a loopback address: other hosts cannot reach {name} there"
        raise HostsError(("hosts", name, "address"), reason)


def _check_engine(path: KeyPath, engine: EngineEntry, hosts: dict[str, Host]) -> None:
    _check_values(path, engine)
    for i, name in enumerate(engine.hosts):
        if name not in hosts:
            raise HostsError((*path, "hosts", i), f"no host {name!r} in `hosts`")
    if len(set(engine.hosts)) < len(engine.hosts):
        raise HostsError((*path, "hosts"), "lists a host twice")
    for name in engine.env:
        if not _VARIABLE.fullmatch(name):
            raise HostsError((*path, "env", name), "must be the name of a variable")
        if _SECRET_VARIABLE.search(name):
            raise HostsError(
                (*path, "env", name),
                "looks like a secret, and every user can read command lines: put it into a file of mode 0600 on the "
                "host, and name the file as env_file",
            )
