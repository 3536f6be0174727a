# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of what its child processes say: what could be loaded, and with `--hardware` how NPUs behave
(tests/npu/test_doctor_hardware.py runs those)."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from vllm_ascend_pd.connector import setup
from vllm_ascend_pd.tools.doctor import hardware, loading, peer
from vllm_ascend_pd.tools.doctor.hardware import STAGES
from vllm_ascend_pd.tools.doctor.loading import PARTS
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, ok
from vllm_ascend_pd.tools.programs import Ran

GONE = "libibverbs.so.1: cannot open shared object file: No such file or directory\nmore"


def load_by(load: Callable[[], object], name: str, monkeypatch: pytest.MonkeyPatch) -> Finding:
    monkeypatch.setitem(PARTS, name, PARTS[name]._replace(load=load))
    return loading.load(name)


def raises(problem: Exception) -> Callable[[], object]:
    def load() -> object:
        raise problem

    return load


@pytest.mark.parametrize(
    ("host", "level"), [("10.0.0.1", Level.OK), ("127.0.0.1", Level.WARNING), ("0.0.0.0", Level.ERROR)]
)
def test_the_host(host: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "host_address", lambda: host)
    found = loading.load("host")
    assert (found.check, found.level, found.figures["host"]) == ("loading.host", level, host)


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, level in (("cpu", Level.OK), ("npu", Level.ERROR)):
        monkeypatch.setattr(setup, "device_type", lambda device=device: device)
        assert loading.load("device").level is level


def test_what_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_by(raises(ImportError(GONE)), "mooncake", monkeypatch)
    assert (found.check, found.level) == ("loading.mooncake", Level.ERROR)
    assert "apt-get install libibverbs1" in found.action
    reason = "libvllm_ascend_pd_kernels.so: cannot open shared object file"
    found = load_by(raises(OSError(reason)), "kernels", monkeypatch)
    assert found.found == f"the NPU's kernels cannot be loaded: OSError: {reason}"
    assert "set_env.sh" in found.action
    found = load_by(lambda: None, "torch", monkeypatch)
    assert (found.level, [*found.figures]) == (Level.OK, ["seconds"])


def test_loading_that_crashes_names_the_part() -> None:
    said = "".join(msgspec.json.encode(ok(f"loading.{part}", "x")).decode() + "\n" for part in ("torch", "ops"))
    *_, crash = loading.judge(Ran(said, "Fatal: undefined symbol", "was ended by SIGSEGV"))
    assert crash.level is Level.ERROR
    assert "stopped at mooncake: the process was ended by SIGSEGV (Fatal: undefined symbol)" in crash.found
    assert "libibverbs1" in crash.action


def test_a_torch_npu_that_does_not_load_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's own process never imports torch, which would load torch_npu (`test_names.py`)."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    found = {each.check.removeprefix("loading."): each for each in loading.check()}
    left_out = {name for name, each in found.items() if each.level is Level.NOTE}
    assert left_out == {"npus", "vllm_ascend", "ops", "kernels", "connector", "device", "host"}
    assert found["torch_npu"].level is Level.ERROR
    assert "libascendcl.so" in found["torch_npu"].found
    assert "set_env.sh" in found["torch_npu"].action


# --- hardware --------------------------------------------------------------------------------------------------


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
    [found] = hardware.check_kernels(60.0)
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


@pytest.mark.parametrize(
    ("built_for", "chip", "level"),
    [
        ("A2", "Ascend910B3", None),
        ("A2", "Ascend910_9392", Level.ERROR),
        ("A3", "Ascend910_9392", None),
        ("A3", "Ascend910B1", Level.ERROR),
        ("A2", "", None),
        ("", "Ascend910B1", None),
        ("A2", "Ascend777", None),
    ],
)
def test_a_vllm_ascend_for_another_chip_is_an_error(built_for: str, chip: str, level: Level | None) -> None:
    """PyPI's wheel of 0.23.0 has kernels of A2 only."""
    found = loading.judge_build(built_for, chip)
    assert (None if found is None else found.level) is level


@pytest.mark.parametrize(
    ("own", "other", "first"),
    [
        ("192.0.2.9", "192.0.2.10", True),
        ("192.0.2.10", "192.0.2.9", False),
        ("192.0.2.200", "2001:db8::1", True),
        ("2001:db8::1", "192.0.2.200", False),
    ],
)
def test_of_two_servers_one_listens(own: str, other: str, first: bool) -> None:
    assert peer.listens(own, other) is first


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        ("192.0.2.9", "192.0.2.9", "own address"),
        ("192.0.2.9", "a-name", "a-name"),
        ("192.0.2.9", "192.0.2.10", "need the cluster's secret"),
        ("127.0.0.1", "192.0.2.10", "need the cluster's secret"),
    ],
)
def test_two_servers_that_cannot_meet_say_so_at_once(own: str, other: str, reason: str) -> None:
    [found] = peer.check(peer.Between(own, other, None), None)
    assert found.level is Level.ERROR
    assert reason in found.found


def test_figures_stand_beside_those_that_hixl_publishes() -> None:
    assert peer.published("Ascend910_9392", "comm", 32 << 10) == ["HCCS, two machines 6.9", "RoCE, two machines 6.3"]
    assert peer.published("Ascend910B3", "client/server", 2 << 20) == ["RoCE, one machine 23.7"]
    assert peer.published("Ascend910B3", "client/server", 64 << 20) == []
    assert peer.published("Ascend950", "client/server", 1 << 20) == []
