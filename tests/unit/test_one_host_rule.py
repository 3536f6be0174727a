# SPDX-License-Identifier: Apache-2.0
"""The metaserver's allow-list and the list of decode hosts give one host one answer, however it is spelled."""

import pytest

from vllm_ascend_pd.core.hosts import HostList, is_loopback, normal_host
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist

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
    with pytest.raises(ValueError, match="metaserver allow-list entry"):
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


def test_the_normal_form_of_a_host_is_its_own_normal_form() -> None:
    for normal, spellings in SPELLINGS.items():
        assert {normal_host(host) for host in (normal, *spellings)} == {normal}
