# SPDX-License-Identifier: Apache-2.0
"""What the doctor reads in `npu-smi info`, of versions 23 to 26, in /etc/hccn.conf and of `hccn_tool`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.protocol import EngineKind
from vllm_ascend_pd.tools.doctor import npus
from vllm_ascend_pd.tools.doctor.npus import Chip, judge, parse
from vllm_ascend_pd.tools.doctor.report import Level
from vllm_ascend_pd.tools.programs import Ran
from vllm_ascend_pd.transport import ascend

CLIENT_SERVER, COMM = EngineKind.CLIENT_SERVER, EngineKind.COMM
A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
| 3     910B4-1             | Warning       | 88.1        32                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          41209/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 3       0                 | 1333928       |                          | 37709                   |
+===========================+===============+====================================================+
"""
A3 = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 7     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     14                  | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 7     Ascend910           | Alarm         | -                    34                      0    / 0                |
| 1     15                  | 0000:9F:00.0  | 0                    0    / 0                15242/ 65536            |
+===========================+===============+======================================================================+
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 7       1                 | 692318        | python3            | 12417                 | NA                      |
+===========================+===============+======================================================================+
"""
INFERENCE = """\
| npu-smi 23.0.0                   Version: 23.0.0                                               |
| NPU     Name              | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device            | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 2       310P3             | OK              | NA           41                1024 / 1024           |
| 1       3                 | 0000:01:00.0    | 0            1849 / 44280                            |
"""
NOT_INITIALISED = "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005\n"


def levels(ran: Ran, wanted: bool = True, seen: list[str] | None = None) -> dict[str, Level]:
    findings, _, _ = judge(ran, wanted, seen)
    return {finding.check: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (A2, ("25.2.0", [Chip(0, 0, "910B4-1", "OK"), Chip(3, 3, "910B4-1", "Warning")])),
        (A3, ("26.0.rc2", [Chip(7, 14, "Ascend910", "OK"), Chip(7, 15, "Ascend910", "Alarm")])),
        (INFERENCE, ("23.0.0", [Chip(2, 3, "310P3", "OK")])),
        ("", None),
        (NOT_INITIALISED, None),
        ("command not understood", None),
    ],
)
def test_tables_of_npu_smi(text: str, parsed: tuple[str, list[Chip]] | None) -> None:
    assert parse(text) == parsed


def test_verdicts() -> None:
    assert levels(Ran(A2, "")) == {"npu.devices": Level.OK, "npu.health.3": Level.WARNING}
    assert levels(Ran(A3, ""))["npu.health.15"] is Level.ERROR
    assert levels(Ran(INFERENCE, "")) == {"npu.devices": Level.OK}
    assert levels(Ran(INFERENCE, ""), wanted=False)["npu.software"] is Level.WARNING


@pytest.mark.parametrize(
    ("seen", "devices", "wrong"),
    [
        (["14"], [14], set()),
        (["?"], [14, 15], {"npu.health.15"}),
        ([], [], {"npu.visible"}),
        (["3"], [], {"npu.visible"}),
    ],
)
def test_only_npus_that_processes_see_count(seen: list[str], devices: list[int], wrong: set[str]) -> None:
    findings, driver, found = judge(Ran(A3, ""), True, seen)
    assert (driver, found) == ("26.0.rc2", devices)
    assert {finding.check for finding in findings if finding.level is Level.ERROR} == wrong


def test_no_tool_is_an_error_only_where_software_is_for_npus() -> None:
    missing = Ran("", "", "cannot be started: No such file or directory")
    assert levels(missing, wanted=False) == {"npu.devices": Level.NOTE}
    assert levels(missing, wanted=True) == {"npu.devices": Level.ERROR}


def test_what_the_tool_says_when_it_fails() -> None:
    for ran in (Ran(NOT_INITIALISED, "", "ended with code 255"), Ran(NOT_INITIALISED, "")):
        [finding], _, _ = judge(ran, wanted=False, seen=None)
        assert finding.level is Level.ERROR
        assert "ret is -8005" in finding.found
        assert "container" in finding.action


IP = "ipaddr:192.0.2.10\nnetmask:255.255.255.0\n"
CONF = """\
address_0=192.0.2.10
netmask_0=255.255.255.0
gateway_0=192.0.2.1
address_1=192.0.2.11
address_2=192.0.2.12
"""

TOOL = """\
#!/bin/sh
case "$*" in
  "-i 1 -link -g") echo "link status: DOWN" ;;
  *"-link -g") echo "link status: UP" ;;
  "-i 0 -ip -g") printf 'ipaddr:192.0.2.10\\nnetmask:255.255.255.0\\n' ;;
  "-i 2 -ip -g") printf 'ipaddr:192.0.2.12\\nnetmask:255.255.255.0\\n' ;;
  "-i 1 -ip -g") printf 'ipaddr:192.0.2.77\\nnetmask:255.255.255.0\\n' ;;
  *) echo "hccn_tool is busy, please try again" >&2; exit 1 ;;
esac
"""


@given(st.data())
def test_no_output_however_garbled_is_an_exception(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([A2, A3, INFERENCE, IP, CONF, "link status: UP"]))
    start, stop = (data.draw(st.integers(0, len(text))) for _ in range(2))
    noise = data.draw(st.text(max_size=30) | st.sampled_from(["9" * 5000, "٣ | ٣", "7 | 0/ : AV\n"]))
    ran = Ran(text[:start] + noise + text[stop:], "")
    findings, _, devices = judge(ran, wanted=True, seen=None)
    assert findings
    assert all(device < 10_000 for device in devices)
    npus.judge_link(0, ran)
    npus.judge_addresses(0, ["192.0.2.10"], ran, CLIENT_SERVER)


def test_a_link_of_which_nothing_is_said_is_not_taken_for_one_that_is_up() -> None:
    assert npus.judge_link(3, Ran("", "")).level is Level.WARNING


def test_an_address_that_the_file_has_wrong_is_an_error() -> None:
    same = npus.judge_addresses(0, ["192.0.2.10"], Ran(IP, ""), CLIENT_SERVER)
    other = npus.judge_addresses(0, ["192.0.2.99"], Ran(IP, ""), CLIENT_SERVER)
    none = npus.judge_addresses(0, ["192.0.2.10"], Ran("", "", "ended with code 1"), CLIENT_SERVER)
    assert [finding.level for finding in (same, other, none)] == [Level.OK, Level.ERROR, Level.WARNING]
    assert "192.0.2.10" in other.found
    assert "192.0.2.99" in other.found


@pytest.mark.parametrize(("kind", "level"), [(CLIENT_SERVER, Level.ERROR), (COMM, Level.WARNING), ("", Level.WARNING)])
def test_an_npu_without_an_address_has_no_client_server_engine(tmp_path: Path, kind: str, level: Level) -> None:
    conf = tmp_path / "hccn.conf"
    assert [finding.level for finding in npus.judge_conf(conf, [0], has_tool=False, kind=kind)] == [level]
    conf.write_text("address_1=192.0.2.11\nIPv6address_0=2001:db8::10\n")
    [finding] = npus.judge_conf(conf, [0, 1], has_tool=True, kind=kind)
    assert (finding.check, finding.level) == ("hccn.conf.0", level)
    assert "ASCEND_LOCAL_COMM_RES" in finding.found
    assert npus.judge_addresses(0, [], Ran("", "", "ended with code 1"), kind).level is level


def test_the_file(tmp_path: Path) -> None:
    conf = tmp_path / "hccn.conf"
    conf.write_text(CONF)
    findings = npus.judge_conf(conf, [0, 1], has_tool=True, kind=CLIENT_SERVER)
    assert [finding.level for finding in findings] == [Level.OK]
    conf.write_text(CONF + "address_3=x\n")
    findings = npus.judge_conf(conf, [0, 1, 3], has_tool=True, kind=COMM)
    assert {finding.check: finding.level for finding in findings} == {"hccn.conf.3": Level.ERROR}


def ask(devices: list[int]) -> dict[str, Level]:
    findings = npus.check_network(devices, CLIENT_SERVER)
    assert all(finding.action for finding in findings if finding.level is not Level.OK)
    return {finding.check: finding.level for finding in findings}


def test_each_device_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "hccn.conf").write_text(CONF)
    monkeypatch.setattr(ascend, "HCCN_CONF", tmp_path / "hccn.conf")
    assert ask([0, 1, 2]) == {
        "hccn.conf": Level.OK,
        "hccn.link.0": Level.OK,
        "hccn.link.1": Level.WARNING,
        "hccn.link.2": Level.OK,
        "hccn.address.0": Level.OK,
        "hccn.address.1": Level.ERROR,
        "hccn.address.2": Level.OK,
    }


def test_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ascend, "HCCN_TOOL", tmp_path / "hccn_tool")
    monkeypatch.setattr(ascend, "HCCN_CONF", tmp_path / "hccn.conf")
    assert ask([0]) == {"hccn.conf.0": Level.ERROR, "hccn.tool": Level.NOTE}
