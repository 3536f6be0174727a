# SPDX-License-Identifier: Apache-2.0
"""The networks of this host's interfaces. Addresses in them count as inside the cluster."""

import ipaddress

import psutil

# The shortest prefix that is used. A wider network says nothing about its hosts. Some clusters use a public /8.
_WIDEST = {4: 8, 6: 32}


def own_networks() -> tuple[str, ...]:
    """Returns the networks of this host's interfaces, sorted. Leaves out loopback, link-local and too wide ones."""
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
    """Returns the mask's length. Raises ValueError for anything that is not a mask, such as one with holes."""
    if netmask is None:
        raise ValueError("no mask")
    mask = ipaddress.ip_address(netmask)
    bits = f"{int(mask):0{mask.max_prefixlen}b}"
    if "01" in bits:
        raise ValueError(f"mask {netmask} has holes")
    return bits.count("1")
