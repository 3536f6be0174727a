# SPDX-License-Identifier: Apache-2.0
"""What the doctor reads in `npu-smi info`, in the formats of its versions 23 to 26."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.tools.doctor.finding import Level
from vllm_ascend_pd.tools.doctor.npus import Chip, judge, parse
from vllm_ascend_pd.tools.doctor.tools import Ran

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


def levels(ran: Ran, wanted: bool = True, seen: list[int] | None = None) -> dict[str, Level]:
    findings, _ = judge(ran, wanted, seen)
    return {finding.check: finding.level for finding in findings}


def test_one_chip_per_npu() -> None:
    found = parse(A2)
    assert found is not None
    assert found.version == "25.2.0"
    assert found.chips == (
        Chip(0, 0, 0, "910B4-1", "OK", 3197, 65536),
        Chip(3, 0, 3, "910B4-1", "Warning", 41209, 65536),
    )
    assert found.processes == ((3, 0),)


def test_two_chips_per_npu_are_numbered_through() -> None:
    found = parse(A3)
    assert found is not None
    assert [(chip.npu, chip.chip, chip.device, chip.health) for chip in found.chips] == [
        (7, 0, 14, "OK"),
        (7, 1, 15, "Alarm"),
    ]
    assert found.processes == ((7, 1),)


def test_memory_of_chips_without_hbm() -> None:
    found = parse(INFERENCE)
    assert found is not None
    assert found.chips == (Chip(2, 1, 3, "310P3", "OK", 1849, 44280),)


@pytest.mark.parametrize("text", ["", NOT_INITIALISED, "command not understood"])
def test_anything_else_is_no_table(text: str) -> None:
    assert parse(text) is None


@given(st.data())
def test_no_table_however_garbled_is_an_exception(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([A2, A3, INFERENCE]))
    start, stop = (data.draw(st.integers(0, len(text))) for _ in range(2))
    noise = data.draw(st.text(alphabet="0123456789|/: \nAV", max_size=30) | st.sampled_from(["9" * 5000, "٣ | ٣"]))
    findings, chips = judge(Ran(text[:start] + noise + text[stop:], ""), wanted=True, seen=None)
    assert findings
    assert all(chip.device < 10_000 for chip in chips)


def test_verdicts() -> None:
    assert levels(Ran(A2, "")) == {
        "npu.devices": Level.OK,
        "npu.health.3": Level.WARNING,
        "npu.use": Level.NOTE,
    }
    assert levels(Ran(A3, ""))["npu.health.15"] is Level.ERROR
    assert levels(Ran(INFERENCE, "")) == {"npu.devices": Level.OK, "npu.health": Level.OK, "npu.use": Level.OK}


def test_npus_that_the_software_cannot_use() -> None:
    assert levels(Ran(INFERENCE, ""), wanted=False)["npu.software"] is Level.WARNING


def test_only_npus_that_processes_see_count() -> None:
    findings, chips = judge(Ran(A3, ""), True, [14])
    assert [chip.device for chip in chips] == [14]
    assert {finding.level for finding in findings} == {Level.OK}
    assert "npu.visible" not in levels(Ran(A3, ""), seen=[14, 15])


def test_processes_that_see_no_npu_or_others_than_the_driver_lists() -> None:
    assert levels(Ran(A3, ""), seen=[])["npu.visible"] is Level.ERROR
    findings, chips = judge(Ran(A3, ""), True, [14, 3])
    [wrong] = [finding for finding in findings if finding.check == "npu.visible"]
    assert wrong.level is Level.WARNING
    assert wrong.found == "processes started here see 14, 3, and npu-smi lists 14, 15"
    assert len(chips) == 2


def test_no_tool_is_an_error_only_where_software_is_for_npus() -> None:
    missing = Ran("", "", "cannot be started: No such file or directory")
    assert levels(missing, wanted=False) == {"npu.devices": Level.NOTE}
    assert levels(missing, wanted=True) == {"npu.devices": Level.ERROR}


def test_what_the_tool_says_when_it_fails() -> None:
    for ran in (Ran(NOT_INITIALISED, "", "ended with code 255"), Ran(NOT_INITIALISED, "")):
        [finding], _ = judge(ran, wanted=False, seen=None)
        assert finding.level is Level.ERROR
        assert "ret is -8005" in finding.found
        assert "container" in finding.action
