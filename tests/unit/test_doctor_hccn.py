# SPDX-License-Identifier: Apache-2.0
"""What the doctor reads in /etc/hccn.conf and of `hccn_tool`, in the formats of CANN's and vllm-ascend's guides."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.tools.doctor import hccn
from vllm_ascend_pd.tools.doctor.finding import Level
from vllm_ascend_pd.tools.doctor.hccn import Ping, parse_addresses, parse_conf, parse_health, parse_link, parse_ping
from vllm_ascend_pd.tools.doctor.tools import Ran
from vllm_ascend_pd.transport import ascend

PING = """\
device 3 PING 192.0.2.16
recv seq=0,time=0.137000ms
recv seq=1,time=0.046000ms
recv seq=2,time=0.058000ms
3 packets transmitted, 3 received, 0.00% packet loss
"""
PING_LOSS = """\
device 0 PING 192.0.2.16
recv time out seq=0
recv seq=1,time=0.097000ms
recv seq=2,time=0.066000ms
3 packets transmitted, 2 received, 33.33% packet loss
"""
PING_LOST = (
    "device 0 PING 192.0.2.9\n"
    + "".join(f"recv time out seq={n}\n" for n in range(3))
    + ("3 packets transmitted, 0 received, 100.00% packet loss\n")
)
IP = "ipaddr:192.0.2.10\nnetmask:255.255.255.0\n"
CONF = """\
address_0=192.0.2.10
netmask_0=255.255.255.0
gateway_0=192.0.2.1
address_1=192.0.2.11
IPv6address_2=2001:db8::2
"""

TOOL = """\
#!/bin/sh
case "$*" in
  "-i 1 -link -g") echo "link status: DOWN" ;;
  *"-link -g") echo "link status: UP" ;;
  "-i 0 -net_health -g") echo "net health status: Success" ;;
  "-i 1 -net_health -g") echo "net health status: Fault" ;;
  "-i 0 -ip -g") printf 'ipaddr:192.0.2.10\\nnetmask:255.255.255.0\\n' ;;
  "-i 1 -ip -g") printf 'ipaddr:192.0.2.77\\nnetmask:255.255.255.0\\n' ;;
  "-i 0 -ping -g address 198.51.100.1") echo "3 packets transmitted, 3 received, 0.00% packet loss" ;;
  "-i 1 -ping -inet6 -g ipv6_address 2001:db8::9") echo "3 packets transmitted, 0 received, 100.00% packet loss" ;;
  *) echo "hccn_tool is busy, please try again" >&2; exit 1 ;;
esac
"""


def test_formats() -> None:
    assert parse_link("link status: UP\n") == "UP"
    assert parse_link("link status: DOWN") == "DOWN"
    assert parse_link("no such device") is None
    assert parse_health("net health status: Success\n") == "Success"
    assert parse_health("net health status: Receive timeout") == "Receive timeout"
    assert parse_health("link status: UP") is None
    assert parse_addresses(IP) == ("192.0.2.10",)
    assert parse_ping(PING) == Ping(3, 3)
    assert parse_ping(PING_LOSS) == Ping(3, 2)
    assert parse_ping("Cmd execute failed!") is None
    assert parse_conf(CONF) == {0: ["192.0.2.10"], 1: ["192.0.2.11"], 2: ["2001:db8::2"]}


@given(st.sampled_from([PING, IP, CONF, "link status: UP"]), st.integers(0, 200), st.text() | st.just("9" * 5000))
def test_garbled_output_is_no_exception(text: str, place: int, noise: str) -> None:
    garbled = Ran(text[:place] + noise + text[place:], "")
    found = [
        *hccn.judge_link(0, garbled),
        *hccn.judge_health(0, garbled),
        *hccn.judge_addresses(0, garbled, parse_conf(garbled.output).get(0, [])),
        *hccn.judge_ping(0, "192.0.2.1", garbled),
    ]
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "level"), [(PING, Level.OK), (PING_LOSS, Level.WARNING), (PING_LOST, Level.ERROR), ("?", Level.ERROR)]
)
def test_ping(text: str, level: Level) -> None:
    [finding] = hccn.judge_ping(0, "192.0.2.9", Ran(text, ""))
    assert finding.level is level


@pytest.mark.parametrize(
    ("status", "level"), [("Success", Level.OK), ("Init", Level.NOTE), ("Fault", Level.WARNING), ("", Level.NOTE)]
)
def test_health(status: str, level: Level) -> None:
    [finding] = hccn.judge_health(3, Ran(f"net health status: {status}\n" if status else "", ""))
    assert (finding.check, finding.level) == ("hccn.health.3", level)


def test_an_address_that_the_file_has_wrong_is_an_error() -> None:
    [same] = hccn.judge_addresses(0, Ran(IP, ""), ["192.0.2.10"])
    [other] = hccn.judge_addresses(0, Ran(IP, ""), ["192.0.2.99"])
    [none] = hccn.judge_addresses(0, Ran("", "", "ended with code 1"), ["192.0.2.10"])
    assert [finding.level for finding in (same, other, none)] == [Level.OK, Level.ERROR, Level.WARNING]
    assert "192.0.2.10" in other.found
    assert "192.0.2.99" in other.found


def test_the_file(tmp_path: Path) -> None:
    conf = tmp_path / "hccn.conf"
    findings, found = hccn.judge_conf(conf, [0], has_tool=False)
    assert ([finding.level for finding in findings], found) == ([Level.WARNING], {})
    conf.write_text(CONF)
    findings, found = hccn.judge_conf(conf, [0, 1, 2], has_tool=True)
    assert [finding.level for finding in findings] == [Level.OK]
    assert found[1] == ["192.0.2.11"]
    conf.write_text(CONF + "address_3=192.0.2.10\naddress_4=x\n")
    findings, _ = hccn.judge_conf(conf, [0, 1, 2, 3, 4], has_tool=True)
    assert {finding.check: finding.level for finding in findings} == {
        "hccn.conf.4": Level.ERROR,
        "hccn.conf.unique": Level.ERROR,
    }


def ask(devices: list[int], peers: list[str], conf: dict[int, list[str]]) -> dict[str, Level]:
    findings = anyio.run(hccn.check_devices, devices, peers, conf)
    assert all(finding.action for finding in findings if finding.level is not Level.OK)
    return {finding.check: finding.level for finding in findings}


def test_each_device_is_asked_and_pings_each_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    conf = {0: ["192.0.2.10"], 1: ["192.0.2.11"], 2: ["2001:db8::2"]}
    assert ask([0, 1, 2], ["198.51.100.1", "2001:db8::9"], conf) == {
        "hccn.link.0": Level.OK,
        "hccn.link.1": Level.WARNING,
        "hccn.link.2": Level.OK,
        "hccn.health.0": Level.OK,
        "hccn.health.1": Level.WARNING,
        "hccn.health.2": Level.NOTE,
        "hccn.address.0": Level.OK,
        "hccn.address.1": Level.ERROR,
        "hccn.ping.0.198.51.100.1": Level.OK,
        "hccn.ping.0.2001:db8::9": Level.ERROR,
        "hccn.ping.1.198.51.100.1": Level.ERROR,
        "hccn.ping.1.2001:db8::9": Level.ERROR,
        "hccn.ping.2.198.51.100.1": Level.ERROR,
        "hccn.ping.2.2001:db8::9": Level.ERROR,
    }
    assert ask([], ["198.51.100.1"], {}) == {"hccn.ping": Level.ERROR}


def test_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ascend, "HCCN_TOOL", tmp_path / "hccn_tool")
    assert ask([0], [], {}) == {"hccn.tool": Level.NOTE}
    assert ask([0], ["198.51.100.1"], {}) == {"hccn.tool": Level.ERROR}
