# SPDX-License-Identifier: Apache-2.0
"""The verdicts of `doctor --hardware` on what its child processes say (tests/npu/test_doctor_hardware.py runs them)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from vllm_ascend_pd.tools.doctor import hardware
from vllm_ascend_pd.tools.doctor.hardware import STAGES
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, ok
from vllm_ascend_pd.tools.programs import Ran


def reported(*reports: msgspec.Struct, errors: str = "", problem: str | None = None) -> Ran:
    return Ran("".join(msgspec.json.encode(report).decode() + "\n" for report in reports), errors, problem)


def passed(count: int) -> list[Finding]:
    return [ok("hardware.collectives", stage) for stage in STAGES[:count]]


def test_ranks_that_pass_all_stages() -> None:
    found = hardware.judge_collectives([reported(*passed(3)), reported(*passed(3))], "AIV")
    assert (found.level, found.found) == (Level.OK, STAGES[2])


@pytest.mark.parametrize(
    ("ranks", "says", "action"),
    [
        ([reported(*passed(3)), reported(*passed(2), problem="hangs")], "rank 1 at all-to-all beside", "HOST"),
        ([reported(problem="hangs"), reported(*passed(1))], "the model's group failed", "HCCL_IF_IP"),
        (
            [reported(*passed(2)), reported(*passed(1), errors="Segmentation fault", problem="was ended by SIGSEGV")],
            "rank 0 at .*of rank 1, the process was ended by SIGSEGV .Segm",
            "plog",
        ),
        ([reported(*passed(1), hardware.stage_failed(1, "507035", "AIV")), reported(*passed(2))], "507035", "plog"),
        (
            [reported(*passed(3)), reported(*passed(2), error("hardware.collectives", "5 bytes are wrong", "do not"))],
            "5 bytes are wrong",
            "do not",
        ),
    ],
)
def test_ranks_that_do_not(ranks: list[Ran], says: str, action: str) -> None:
    found = hardware.judge_collectives(ranks, "AIV")
    assert found.level is Level.ERROR
    assert re.search(says, found.found), found
    assert action in found.action


def test_what_a_library_prints_when_imported_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('a banner')\nraise ImportError('no CANN here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = hardware.check_kernels(60.0)
    assert found.level is Level.ERROR
    assert "ImportError: no CANN here" in found.found


def test_ways_name_npus_as_the_machine_counts_them() -> None:
    ways = hardware.ways(["4", "5", "6", "7"], "192.0.2.1")
    assert [way.check for way in ways] == [
        "hardware.write.ascend.4-5",
        "hardware.write.ascend.4-7",
        "hardware.write.roce.7-4",
    ]
    assert [bool(way.descriptor_bytes) for way in ways] == [True, False, True]
    assert [(way.source, way.destination) for way in hardware.ways(["4", "5"], "h")] == [(0, 1), (1, 0)]


def test_without_torch_npu_no_npu_is_tried() -> None:
    [finding] = hardware.check([], "127.0.0.1")
    assert (finding.check, finding.level) == ("hardware.devices", Level.ERROR)
    assert "requirements/npu.txt" in finding.action
