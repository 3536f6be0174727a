# SPDX-License-Identifier: Apache-2.0
"""A cluster with addresses that are not private: the networks that an engine's host is in count as inside."""

from types import SimpleNamespace

import psutil
import pytest

from vllm_ascend_pd.core.hosts import decode_hosts
from vllm_ascend_pd.transport.own_networks import own_networks

V6 = "ffff:ffff:ffff:ffff::"
INTERFACES = {
    "lo": [("127.0.0.1", "255.0.0.0"), ("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
    "eth0": [
        ("198.51.100.7", "255.255.240.0"),
        ("2001:db8:1::7", V6),
        ("fe80::1%eth0", V6),
        ("02:fc:00:00:00:01", None),
    ],
    "eth1": [("11.3.4.5", "255.0.0.0"), ("169.254.3.4", "255.255.0.0")],
    "tun0": [("203.0.113.9", None), ("203.0.113.10", "0.0.0.0"), ("4.4.4.4", "254.0.0.0"), ("5.5.5.5", "255.0.255.0")],
    "ppp0": [("192.0.2.1", "255.255.255.255"), ("2001:db8:2::1", "ffff::"), ("6.6.6.6", "what")],
}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        name: [SimpleNamespace(address=address, netmask=mask) for address, mask in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: named)


def test_networks_of_interfaces(interfaces: None) -> None:
    assert own_networks() == ("11.0.0.0/8", "192.0.2.1/32", "198.51.96.0/20", "2001:db8:1::/64")


def test_networks_of_this_machine_are_networks() -> None:
    decode_hosts((), "localhost", signed=False, own_networks=own_networks())


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        *(("198.51.100.200", True), ("198.51.111.255", True), ("11.200.0.1", True), ("2001:db8:1::99", True)),
        *(("10.9.9.9", True), ("198.51.112.0", False), ("4.4.4.5", False), ("203.0.113.9", False)),
        *(("169.254.169.254", False), ("8.8.8.8", False), ("2001:db8:9::1", False), ("5.5.5.6", False)),
    ],
)
def test_decode_hosts_in_prefills_own_networks(interfaces: None, host: str, inside: bool) -> None:
    hosts = decode_hosts((), "198.51.100.7", signed=False, own_networks=own_networks())
    assert (hosts.refusal(host) is None) is inside
    listed = decode_hosts(("10.9.9.9",), "198.51.100.7", signed=False, own_networks=own_networks())
    assert (listed.refusal(host) is None) is (host == "10.9.9.9"), "a list is all there is"
