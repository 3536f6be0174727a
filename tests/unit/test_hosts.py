# SPDX-License-Identifier: Apache-2.0
"""Which hosts may be connected to, and from which peers may connect."""

from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core import hosts as hosts_module
from vllm_ascend_pd.core.hosts import AnyHost, HostList, engine_hosts, host_of, is_host, is_loopback
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.transport.own_networks import own_networks

LISTED = HostList(("10.1.0.0/16", "192.168.7.9", "fd00:1::/32", "decode-7.example"), "is not listed")
OWN = "203.0.113.5"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "10.2.0.1",
            "192.168.7.8",
            "fd00:2::1",
            "decode-7.example.org",
            "decode-77.example",
            "127.0.0.1",
            "localhost",
        ),
        *("169.254.169.254", "", "10.1.0.1 ", "10.1.0.1:80", "10.1", "167837697", "0x0a010001", "10.1.0.1.example"),
    ],
)
def test_what_a_list_refuses(host):
    assert LISTED.refusal(host) == "host is not listed"


@pytest.mark.parametrize("entry", ["10.1.0.1/16", "10.1.0.0/33", "", "a b", "http://10.0.0.1", "10.1", "a/b", "*"])
def test_what_cannot_be_on_a_list(entry):
    with pytest.raises(ValueError, match="is not a host, an address or a network"):
        HostList((entry,), "")


@pytest.mark.parametrize(
    ("host", "private"),
    [
        *(("127.0.0.1", True), ("10.0.0.7", True), ("172.31.0.1", True), ("192.168.0.1", True), ("100.64.0.9", True)),
        *(("::1", True), ("fd12::1", True), ("localhost", True), (OWN, True)),
        *(("172.32.0.1", False), ("8.8.8.8", False), ("203.0.113.6", False), ("169.254.169.254", False)),
        *(("2001:db8::1", False), ("::ffff:8.8.8.8", False), ("0.0.0.0", False), ("decode-7", False), ("127.1", False)),
    ],
)
def test_without_a_list_a_secret_a_trusted_network_or_this_host_alone(host, private):
    trusted = engine_hosts((), OWN, secret=False, trust_network=True).refusal(host)
    assert (trusted is None) is private
    alone = engine_hosts((), OWN, secret=False, trust_network=False).refusal(host)
    assert (alone is None) is (host in ("127.0.0.1", "::1", "localhost", OWN))
    for refusal in {trusted, alone} - {None}:
        assert "`vllm-ascend-pd secret`" in refusal
        assert "peers" in refusal
    for trust_network in (False, True):
        assert engine_hosts((), OWN, secret=True, trust_network=trust_network).refusal(host) is None
        for secret in (False, True):
            listed = engine_hosts(("10.9.9.9",), OWN, secret=secret, trust_network=trust_network)
            assert listed.refusal(host) is not None, "a list is all there is"


PORTS = ("10.1.0.0/16:7000-7999", "10.1.2.3:22", "[fd00:1::/32]:8998", "[::ffff:10.3.0.1]:9", "node-3:8998", "node-4")


@pytest.mark.parametrize(
    ("host", "admitted", "refused"),
    [
        ("10.1.0.1", (7000, 7999), (6999, 8000, 22)),
        ("10.1.2.3", (7000, 22), (23,)),
        ("fd00:1::7", (8998,), (8999,)),
        ("10.3.0.1", (9,), (10,)),
        ("NODE-3", (8998,), (1,)),
        ("node-4", (1, 65535), ()),
        ("10.2.0.1", (), (7000,)),
    ],
)
def test_which_ports_are_connected_to(host, admitted, refused):
    listed = HostList(PORTS, "is not listed")
    assert [port for port in (*admitted, *refused) if listed.refusal(host, port) is None] == [*admitted]
    assert (listed.refusal(host) is None) is bool(admitted), "a port that the host chose itself"
    for port in refused:
        assert ("not this port" in listed.refusal(host, port)) is bool(admitted)
    assert AnyHost().refusal(host, 1) is None


@pytest.mark.parametrize("address", ["10.1.0.1", "fd00:1::7"])
def test_ports_of_a_list_are_not_compared_with_those_that_peers_connect_from(address):
    assert HostList(PORTS[:4], "is not listed").refusal_of_peer(address) is None


@pytest.mark.parametrize(
    "entry",
    [
        *("10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:x", "10.0.0.1:-1", "10.0.0.1:1-", "10.0.0.1:9-8"),
        *("10.0.0.1:1-65536", "10.0.0.1: 1", "10.0.0.1:1\n", "10.0.0.1:\u0661", "10.0.0.1:1-2-3", "10.0.0.1:01"),
        *("[fd00::1]", "[fd00::1]80", "[fd00::1]:", "[10.0.0.1]:80", "[node-3]:80", "[]:80", ":80", "a/b:1"),
    ],
)
def test_what_is_no_host_with_ports(entry):
    with pytest.raises(ValueError, match="is not a host, an address or a network") as error:
        HostList((entry,), "")
    assert repr(entry) in str(error.value)


@pytest.mark.parametrize(
    ("named", "secret", "address", "admitted"),
    [
        *(((), False, "10.0.0.7", True), ((), False, OWN, True), ((), False, "8.8.8.8", False)),
        *(((), True, "8.8.8.8", True), (("10.9.9.9",), True, "8.8.8.8", False), (("10.9.9.9",), False, OWN, False)),
        *(((), False, "::ffff:10.0.0.7", True), ((), False, "fe80::1%eth0", False)),
    ],
)
def test_who_may_connect(named, secret, address, admitted):
    hosts = engine_hosts(named, OWN, secret=secret, trust_network=True)
    assert (hosts.refusal_of_peer(address) is None) is admitted


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("tcp://10.0.0.1:5555", "10.0.0.1"),
        ("10.0.0.1:1", "10.0.0.1"),
        ("tcp://[fd00::1]:65535", "fd00::1"),
        ("fd00::1:7777", "fd00::1"),
        ("tcp://decode-7.example:80", "decode-7.example"),
    ],
)
def test_the_host_of_an_endpoint(endpoint, host):
    assert host_of(endpoint) == host


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "",
            "10.0.0.1",
            "tcp://10.0.0.1",
            "10.0.0.1:",
            "10.0.0.1:0",
            "10.0.0.1:65536",
            "10.0.0.1:+80",
            "10.0.0.1:８０",
        ),
        *("ipc:///tmp/x:1", "inproc://x:1", "tcp://*:80", "tcp://eth0;10.0.0.1:80", "tcp://10.0.0.2:0;10.0.0.1:80"),
        *(
            "http://10.0.0.1:80",
            "tcp://a@b:80",
            "tcp://:80",
            "10.0.0.1:80\n",
            "10.0.0.1\n:80",
            "tcp://[::1:80",
            "[x]:80:1",
        ),
    ],
)
def test_what_is_no_endpoint(endpoint):
    with pytest.raises(ValueError, match="is not host:port"):
        host_of(endpoint)


@given(st.text())
def test_nothing_raises(text):
    is_host(text)
    assert isinstance(LISTED.refusal(text), str)


# The metaserver's allow-list and the list of decode hosts give one host one answer, however it is spelled.

SPELLINGS = {
    "10.0.0.1": ("10.0.0.1", "::ffff:10.0.0.1", "::FFFF:10.0.0.1", "::ffff:a00:1", "0:0:0:0:0:ffff:0a00:0001"),
    "fd00::a": ("fd00::a", "FD00::A", "fd00:0:0:0:0:0:0:a", "fd00::000a"),
    "decode-7.example": ("decode-7.example", "DECODE-7.example", "Decode-7.Example"),
}
NO_HOSTS = ["fd00::a%eth0", "fe80::1%1", "10.0.0.1%eth0", "decode-7.example.", "decode..example", "-", "[fd00::a]", ""]
AMBIGUOUS = ["10.1", "0x0a000001", "167772161", "10.0.0.0x1"]
PAIRS = [(entry, host) for one in SPELLINGS.values() for entry in one for host in one]
OTHERS = [(a, b) for one in SPELLINGS for a in SPELLINGS[one] for other in SPELLINGS if other != one for b in [other]]


def url(host: str, path: str = METASERVER_PATH) -> str:
    return f"http://[{host}]:8000{path}" if ":" in host else f"http://{host}:8000{path}"


@pytest.mark.parametrize(("entry", "host"), PAIRS)
def test_a_host_is_admitted_by_both_lists_in_every_spelling(entry: str, host: str) -> None:
    assert HostList((entry,), "is not listed").refusal(host) is None
    assert Allowlist((url(entry, ""),), "localhost").refusal(url(host)) is None
    assert Allowlist((), own_host=entry).refusal(url(host)) is None


@pytest.mark.parametrize(("entry", "host"), OTHERS)
def test_another_host_is_refused_by_both_lists(entry: str, host: str) -> None:
    assert HostList((entry,), "is not listed").refusal(host) is not None
    assert Allowlist((url(entry, ""),), "localhost").refusal(url(host)) is not None
    assert Allowlist((), own_host=entry).refusal(url(host)) is not None


@pytest.mark.parametrize("host", NO_HOSTS + AMBIGUOUS)
def test_what_is_no_host_is_refused_by_both_lists(host: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        HostList((host,), "is not listed")
    with pytest.raises(ValueError, match="peers: "):
        Allowlist((url(host, ""),), "localhost")
    assert HostList(("0.0.0.0/0", "::/0", "decode-7.example"), "is not listed").refusal(host) is not None
    assert Allowlist((), own_host=host).refusal(url(host)) is not None


@pytest.mark.parametrize(
    "network", ["10.0.0.0/24", "::ffff:10.0.0.0/120", "::FFFF:a00:0/120", "::ffff:0:0/96", "0.0.0.0/0"]
)
def test_a_network_is_one_network_in_every_spelling(network: str) -> None:
    hosts = HostList((network,), "is not listed")
    for host in SPELLINGS["10.0.0.1"]:
        assert hosts.refusal(host) is None
    assert hosts.refusal("fd00::a") is not None


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0:0:0:0:0:0:0:1", True), ("localhost", True)),
        *(("LocalHost", True), ("::ffff:127.0.0.1", True), ("::FFFF:7f00:1", True)),
        *(("::1%lo", False), ("::2", False), ("::ffff:10.0.0.1", False), ("localhost.example", False), ("", False)),
    ],
)
def test_loopback_is_loopback_in_every_spelling(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    if host and "%" not in host:
        assert (Allowlist((), own_host="192.0.2.1").refusal(url(host)) is None) is loopback


# --- networks that an engine's host is in, which count as inside -------------------------------------------------

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
    engine_hosts((), "localhost", secret=False, trust_network=True, own_networks=own_networks())


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        *(("198.51.100.200", True), ("198.51.111.255", True), ("11.200.0.1", True), ("2001:db8:1::99", True)),
        *(("10.9.9.9", True), ("198.51.112.0", False), ("4.4.4.5", False), ("203.0.113.9", False)),
        *(("169.254.169.254", False), ("8.8.8.8", False), ("2001:db8:9::1", False), ("5.5.5.6", False)),
    ],
)
def test_hosts_in_own_networks(interfaces: None, host: str, inside: bool) -> None:
    own = own_networks()
    hosts = engine_hosts((), "198.51.100.7", secret=False, trust_network=True, own_networks=own)
    assert (hosts.refusal(host) is None) is inside
    listed = engine_hosts(("10.9.9.9",), "198.51.100.7", secret=False, trust_network=True, own_networks=own)
    assert (listed.refusal(host) is None) is (host == "10.9.9.9"), "a list is all there is"


def test_addresses_are_parsed_once_and_long_texts_never() -> None:
    """A description of 4,096 ranks kept the thread that reads it for 70 ms."""
    parsed = hosts_module._parsed
    parsed.cache_clear()
    for _ in range(5):
        assert is_host("10.0.0.1")
        assert host_of("tcp://10.0.0.1:80") == "10.0.0.1"
        assert not is_host("1" * 10_000 + "!")
    assert is_host("0000:0000:0000:0000:0000:ffff:255.255.255.255")
    info = parsed.cache_info()
    assert (info.misses, info.currsize) == (2, 2)
    assert info.maxsize is not None
