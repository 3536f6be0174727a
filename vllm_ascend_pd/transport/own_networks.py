# SPDX-License-Identifier: Apache-2.0
"""The networks that this host is in: which addresses of others are inside the cluster, whoever they were given by."""

import ipaddress

import psutil

# A wider mask says nothing about who is inside. Clusters do use public /8 networks of their own.
_WIDEST = {4: 8, 6: 32}


def own_networks() -> tuple[str, ...]:
    """Networks of this host's interfaces, sorted. Loopback and link-local ones are left out, as are wide masks."""
    found = set()
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            try:
                interface = ipaddress.ip_interface(f"{each.address}/{_prefix(each.netmask)}")
            except (ValueError, TypeError):  # a hardware address, one with a zone, or one without a mask
                continue
            ip, network = interface.ip, interface.network
            if ip.is_loopback or ip.is_link_local or ip.is_multicast or network.prefixlen < _WIDEST[network.version]:
                continue
            found.add(network)
    return tuple(map(str, sorted(found, key=lambda network: (network.version, network))))


def _prefix(netmask: str | None) -> int:
    """The mask's length. Raises ValueError, also for one with holes."""
    if netmask is None:
        raise ValueError("no mask")
    mask = ipaddress.ip_address(netmask)
    bits = f"{int(mask):0{mask.max_prefixlen}b}"
    if "01" in bits:
        raise ValueError(f"mask {netmask} has holes")
    return bits.count("1")
