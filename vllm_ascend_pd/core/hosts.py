# SPDX-License-Identifier: Apache-2.0
"""Parses and compares the hosts that peers and clients name, and decides which may be connected to.

Every allow-list uses this module, so all give the same answer for a host. Names are compared as text and never looked
up, so DNS cannot widen a list.
"""

import functools
import ipaddress
import re
from collections.abc import Sequence

from vllm_ascend_pd.core.bounds import MAX_RANKS

_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")

# The longest: an IPv6 address that ends in an IPv4 one, with all its zeros.
_MAX_ADDRESS_CHARS = 45
_IPV4_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")

_LOOPBACK = ("localhost", "127.0.0.0/8", "::1")
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")

_PORTS = re.compile(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?")
_ALL_PORTS = range(1, 1 << 16)

# Most hosts and networks that a log line names. A host with many virtual interfaces is in hundreds of networks.
_NAMED = 32


def is_host(text: str) -> bool:
    """Returns whether `text` is an IP address or a host name, and nothing else, such as a port or a path."""
    return _address(text) is not None or _NAME.fullmatch(text) is not None


def normal_host(host: str) -> str:
    """Returns the one spelling of a host. An IPv4 address in IPv6 notation (`::ffff:10.0.0.1`) becomes IPv4."""
    address = _address(host)
    return host.lower() if address is None else str(address)


def is_loopback(host: str) -> bool:
    """Returns whether `host` means the machine that connects to it."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def ip_version(host: str) -> int | None:
    """Returns 4 or 6 for an address; None for a name."""
    address = _address(host)
    return None if address is None else address.version


def authority(host: str, port: int) -> str:
    """Returns `host:port` for URLs and endpoints, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(endpoint: str) -> str:
    """Returns the host of `host:port` or `tcp://host:port`.

    Raises ValueError for anything else. The message does not quote it, since clients must not learn addresses.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not is_host(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("one of its addresses is not host:port")
    return host


def in_words(entries: Sequence[str]) -> str:
    """Returns the entries of an allow-list for a log. Of many, it names only some."""
    left_out = len(entries) - _NAMED
    return ", ".join(entries[:_NAMED]) + (f" and {left_out} more" if left_out > 0 else "")


class HostList:
    """Decides which hosts are admitted, and which of their ports are connected to."""

    def __init__(self, entries: Sequence[str], hint: str) -> None:
        """
        `entries`: addresses, networks (`10.0.0.0/8`) and names. Each may have a port or a range of ports
            (`10.0.0.0/8:7000-7999`, `[fd00::/8]:8998`).
        `hint`: ends the sentence "host ..." about one that is not admitted. It says what to do.

        Raises ValueError, which names an entry that is none of these.
        """
        self.admitted = in_words(entries) or "no host"
        self._networks: list[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, range]] = []
        self._names: dict[str, list[range]] = {}
        self._hint = hint
        for entry in entries:
            try:
                host, ports = _split(entry)
                if (network := _network_or_name(host)) is None:
                    self._names.setdefault(normal_host(host), []).append(ports)
                else:
                    self._networks.append((network, ports))
            except ValueError as error:
                raise ValueError(f"{entry!r} is not a host, an address or a network: {error}") from None

    def refusal(self, host: str, port: int | None = None) -> str | None:
        """Returns why `host` must not be connected to; None if it may. The reason does not name it: clients may
        read it.

        `port`: None for one that the admitted host chose itself: its entry's ports do not bind it.
        """
        address = _address(host)
        if address is None:
            found = self._names.get(host.lower(), [])
        else:
            of_version = (each for each in self._networks if each[0].version == address.version)
            found = [ports for network, ports in of_version if address in network]
        if not found:
            return f"host {self._hint}"
        if port is not None and not any(port in ports for ports in found):
            return "host is admitted, but not this port of it (peers)"
        return None

    def refusal_of_peer(self, address: str) -> str | None:
        """Returns why a peer that connects from `address` is refused; None if it is admitted.

        A list with names other than `localhost` admits every address: names are not looked up.
        """
        return None if self._names.keys() - {"localhost"} else self.refusal(address)


class AnyHost(HostList):
    """Admits every host."""

    def __init__(self) -> None:
        super().__init__((), "")
        self.admitted = "any host"

    def refusal(self, host: str, port: int | None = None) -> str | None:
        return None


def engine_hosts(
    named: Sequence[str], own_host: str, *, secret: bool, trust_network: bool, own_networks: Sequence[str] = ()
) -> HostList:
    """Returns the hosts of engines that may connect to this one and that it may connect to.

    They are those in `named` if it has entries. Else any host if engines share a `secret`. Else with `trust_network`
    private networks, `own_networks` (those of this host's interfaces) and this host. Else this host alone. Raises
    ValueError.
    """
    if named:
        return HostList(named, "is not in peers")
    if secret:
        return AnyHost()
    if trust_network:
        return HostList(
            (*_LOOPBACK, *_PRIVATE, *own_networks, own_host),
            "is not a private address, and not in a network of this host: name it in peers, or give all engines one "
            "secret (`vllm-ascend-pd secret`)",
        )
    return HostList(
        (*_LOOPBACK, own_host),
        "is another one than this engine's: give all engines one secret (`vllm-ascend-pd secret`), or name it in peers",
    )


def _split(entry: str) -> tuple[str, range]:
    """Returns the host or network of an entry, and its ports: all if it names none. Raises ValueError."""
    if entry.startswith("["):
        host, bracket, ports = entry[1:].partition("]:")
        if not bracket or ":" not in host:
            raise ValueError("brackets around an IPv6 address need a port after them")
    elif entry.count(":") == 1:
        host, _, ports = entry.partition(":")
    else:
        return entry, _ALL_PORTS
    found = _PORTS.fullmatch(ports)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise ValueError(f"{ports!r} is neither a port nor a range of ports")
    return host, range(first, last + 1)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if "%" in host:  # an IPv6 zone is valid on its own host only, and may be any text
        return None
    return _parsed(host) if len(host) <= _MAX_ADDRESS_CHARS else None


@functools.lru_cache(MAX_RANKS)  # a description names the host of each rank several times
def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _network_or_name(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Returns the network; None for a host's name. Raises ValueError for anything else."""
    try:
        return _network(text)
    except ValueError:
        if "/" in text or not is_host(text) or looks_numeric(text):
            raise
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Raises ValueError."""
    if "%" in text:
        raise ValueError("a zone has a meaning only on its own host")
    network = ipaddress.ip_network(text)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_IPV4_MAPPED):
        return ipaddress.IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
    return network


def looks_numeric(name: str) -> bool:
    """Returns whether a resolver may read `name` as an address: `127.1`, `0x7f000001`. `is_host` reads it as a name."""
    last = name.rpartition(".")[2]
    return _address(name) is None and re.fullmatch(r"(0[xX][0-9a-fA-F]*|[0-9]+)", last) is not None
