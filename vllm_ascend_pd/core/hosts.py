# SPDX-License-Identifier: Apache-2.0
"""Parses and compares the hosts that peers and clients name, and decides which may be connected to.

Every allow-list uses this module, so all give the same answer for a host. Names are compared as text and never looked
up, so DNS cannot widen a list.
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
    """Decides which hosts are admitted."""

    def __init__(self, entries: Sequence[str], hint: str) -> None:
        """
        `entries`: addresses, networks (`10.0.0.0/8`) and names.
        `hint`: ends the sentence "host ..." about one that is not admitted. It says what to do.

        Raises ValueError, which names an entry that is none of these.
        """
        self.admitted = in_words(entries)
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
        """Returns why `host` must not be connected to; None if it may. The reason does not name it: clients may
        read it."""
        address = _address(host)
        if address is None:
            admitted = host.lower() in self._names
        else:
            admitted = any(address in network for network in self._networks if network.version == address.version)
        return None if admitted else f"host {self._hint}"

    def refusal_of_peer(self, address: str) -> str | None:
        """Returns why a peer that connects from `address` is refused; None if it is admitted.

        A list with names other than `localhost` admits every address: names are not looked up.
        """
        return None if self._names - {"localhost"} else self.refusal(address)


class AnyHost(HostList):
    """Admits every host."""

    def __init__(self) -> None:
        super().__init__((), "")
        self.admitted = "any host"

    def refusal(self, host: str) -> str | None:
        return None


def decode_hosts(allowlist: Sequence[str], own_host: str, signed: bool, own_networks: Sequence[str] = ()) -> HostList:
    """Returns the hosts where prefill may look for decode engines.

    They are those in `allowlist` if it has entries. Else any host if tickets are `signed` with the cluster's secret.
    Else private networks, `own_networks` (those of this host's interfaces) and this host. Raises ValueError.
    """
    if allowlist:
        return HostList(allowlist, "is not in decode_allowlist")
    if signed:
        return AnyHost()
    return HostList(
        (*_PRIVATE, *own_networks, own_host),
        "is not a private address, and not in a network of prefill's host: name it in decode_allowlist, or sign "
        "tickets (ticket_secret_file)",
    )


def prefill_hosts(allowlist: Sequence[str], own_host: str, own_networks: Sequence[str] = ()) -> HostList:
    """Returns the hosts where decode may look for prefill engines that a request names.

    They are those in `allowlist` if it has entries. Else private networks, `own_networks` (those of this host's
    interfaces) and this host, also with signed tickets: the request is a client's. Raises ValueError.
    """
    if allowlist:
        return HostList(allowlist, "is not in prefill_allowlist")
    return HostList(
        (*_PRIVATE, *own_networks, own_host),
        "is not a private address, and not in a network of decode's host: name it in prefill_allowlist",
    )


def prefill_peers(allowlist: Sequence[str], own_host: str, keys: bool, own_networks: Sequence[str] = ()) -> HostList:
    """Returns the hosts that may connect to decode's listeners: those of `prefill_hosts`.

    Without an `allowlist`, any host may if peers need the cluster's `keys`. Raises ValueError.
    """
    return AnyHost() if keys and not allowlist else prefill_hosts(allowlist, own_host, own_networks)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if "%" in host:  # an IPv6 zone is valid on its own host only, and may be any text
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
        raise ValueError("a zone has a meaning only on its own host")
    network = ipaddress.ip_network(text)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_IPV4_MAPPED):
        return ipaddress.IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
    return network


def looks_numeric(name: str) -> bool:
    """Returns whether a resolver may read `name` as an address: `127.1`, `0x7f000001`. `is_host` reads it as a name."""
    last = name.rpartition(".")[2]
    return _address(name) is None and re.fullmatch(r"(0[xX][0-9a-fA-F]*|[0-9]+)", last) is not None
