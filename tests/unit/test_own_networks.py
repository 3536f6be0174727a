# SPDX-License-Identifier: Apache-2.0
"""A cluster with addresses that are not private: the networks that an engine's host is in count as inside."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from vllm_ascend_pd.core.hosts import decode_hosts
from vllm_ascend_pd.tools.doctor import configuration
from vllm_ascend_pd.tools.doctor.report import Finding, Level
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


def test_the_doctor_says_what_prefill_will_refuse(interfaces: None, caplog: pytest.LogCaptureFixture) -> None:
    given = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_producer"}
    with caplog.at_level(logging.INFO):
        findings, _ = configuration.judge(configuration.read(json.dumps(given)))
    [found] = [finding.found for finding in findings if finding.check == "config.decode_hosts"]
    assert "198.51.96.0/20" in found
    assert found.endswith("are refused")


def judged(**extra: Any) -> dict[str, Finding]:
    """What the doctor finds in the configuration of a decode engine, by check."""
    given = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    findings, _ = configuration.judge(configuration.read(json.dumps(given)))
    return {finding.check: finding for finding in findings}


def test_the_doctor_says_where_decodes_tickets_may_go(interfaces: None) -> None:
    by_default = judged()
    assert by_default["config.metaservers"].level is Level.NOTE  # right for a proxy on this host only
    assert "this host only" in by_default["config.metaservers"].found
    assert "metaserver_allowlist" in by_default["config.metaservers"].action
    assert "198.51.96.0/20" in by_default["config.prefill_hosts"].found
    listed = judged(metaserver_allowlist=["http://proxy.example:8000"], prefill_allowlist=["203.0.113.0/24"])
    assert listed["config.metaservers"].level is Level.OK
    assert "http://proxy.example:8000" in listed["config.metaservers"].found
    assert "203.0.113.0/24" in listed["config.prefill_hosts"].found
    assert "198.51.96.0/20" not in listed["config.prefill_hosts"].found


def test_the_doctor_refuses_a_metaserver_that_is_no_url(interfaces: None) -> None:
    found = judged(metaserver_allowlist=["proxy.example:8000"])["config.metaservers"]
    assert found.level is Level.ERROR
    assert "proxy.example:8000" in found.found
