# SPDX-License-Identifier: Apache-2.0
"""What doctor makes of what its child process could load."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from vllm_ascend_pd.connector import setup
from vllm_ascend_pd.tools.doctor import loading
from vllm_ascend_pd.tools.doctor.loading import PARTS
from vllm_ascend_pd.tools.doctor.report import Finding, Level, ok
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
    assert left_out == {"npus", "ops", "kernels", "connector", "device", "host"}
    assert found["torch_npu"].level is Level.ERROR
    assert "libascendcl.so" in found["torch_npu"].found
    assert "set_env.sh" in found["torch_npu"].action
