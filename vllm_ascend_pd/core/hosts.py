# SPDX-License-Identifier: Apache-2.0
"""Hosts that peers and clients name: how they are spelled and compared, and which may be connected to.

Every allow-list uses this module, so a host gets the same answer from each. Names are compared as they are and never
looked up, so an answer of the DNS cannot widen a list.
"""

import ipaddress
import re
from collections.abc import Sequence

_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")

_IPV4_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")

_PRIVATE = (
    "localhost",
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "::1",
    "fc00::/7",
)

# Hosts and networks that a log line names. A host with many virtual interfaces is in hundreds of networks.
_NAMED = 32


def is_host(text: str) -> bool:
    """Whether `text` is an address or a name: nothing that an address parser could take for more than that."""
    return _address(text) is not None or _NAME.fullmatch(text) is not None


def normal_host(host: str) -> str:
    """One spelling per host. An IPv4 address that is written as an IPv6 one (`::ffff:10.0.0.1`) becomes IPv4."""
    address = _address(host)
    return host.lower() if address is None else str(address)


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, for whoever connects to it."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def ip_version(host: str) -> int | None:
    """4 or 6 for an address; None for a name."""
    address = _address(host)
    return None if address is None else address.version


def authority(host: str, port: int) -> str:
    """`host:port` as it stands in URLs and endpoints: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(endpoint: str) -> str:
    """The host of `host:port` or `tcp://host:port`. Raises ValueError where it is anything else, without quoting it:
    clients shall not learn addresses."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not is_host(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("an address of its is not host:port")
    return host


class HostList:
    """Which hosts are admitted. `hint` is what to do about one that is not."""

    def __init__(self, entries: Sequence[str], hint: str) -> None:
        """`entries`: addresses, networks (`10.0.0.0/8`) and names. Raises ValueError naming one that is neither."""
        left_out = len(entries) - _NAMED
        self.admitted = ", ".join(entries[:_NAMED]) + (f" and {left_out} more" if left_out > 0 else "")
        """In words, for logs."""
        self._networks = []
        self._names = set()
        self._hint = hint
        for entry in entries:
            try:
                self._networks.append(_network(entry))
            except ValueError as error:
                if "/" in entry or not is_host(entry) or looks_numeric(entry):
                    raise ValueError(f"{entry!r} is not a host, an address or a network: {error}") from None
                self._names.add(normal_host(entry))

    def refusal(self, host: str) -> str | None:
        """Why `host` must not be connected to, without its name, which clients shall not learn; None if it may."""
        address = _address(host)
        if address is None:
            admitted = host.lower() in self._names
        else:
            admitted = any(address in network for network in self._networks if network.version == address.version)
        return None if admitted else f"host {self._hint}"


class AnyHost(HostList):
    """Admits every host."""

    def __init__(self) -> None:
        super().__init__((), "")
        self.admitted = "any host"

    def refusal(self, host: str) -> str | None:
        return None


def decode_hosts(allowlist: Sequence[str], own_host: str, signed: bool, own_networks: Sequence[str] = ()) -> HostList:
    """Where prefill may look for decode engines: `allowlist` if it says anything; else anywhere, if tickets are
    signed by who knows the cluster's secret; else in private networks, in `own_networks`, which this host is in, and on
    this host. Raises ValueError."""
    if allowlist:
        return HostList(allowlist, "is not in decode_allowlist")
    if signed:
        return AnyHost()
    return HostList(
        (*_PRIVATE, *own_networks, own_host),
        "is no private address, and in no network of prefill's host: name it in decode_allowlist, or have tickets "
        "signed (ticket_secret_file)",
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if "%" in host:  # an IPv6 zone, which means something on its own host alone, and may be any text
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Raises ValueError."""
    if "%" in text:
        raise ValueError("a zone means something on its own host alone")
    network = ipaddress.ip_network(text)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_IPV4_MAPPED):
        return ipaddress.IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
    return network


def looks_numeric(name: str) -> bool:
    """Whether resolvers may take `name` for an address that `is_host` takes for a name: `127.1`, `0x7f000001`."""
    last = name.rpartition(".")[2]
    return _address(name) is None and re.fullmatch(r"(0[xX][0-9a-fA-F]*|[0-9]+)", last) is not None
