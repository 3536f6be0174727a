# SPDX-License-Identifier: Apache-2.0
"""What doctor makes of what its child process could load."""

from pathlib import Path

import pytest

from vllm_ascend_pd.tools.doctor import loading
from vllm_ascend_pd.tools.doctor.loading import Loaded
from vllm_ascend_pd.tools.doctor.process import Ran
from vllm_ascend_pd.tools.doctor.report import Level

LOADED = [
    Loaded("torch", 1.0, "2.13.0"),
    Loaded("ops", 0.1),
    Loaded("mooncake", 0.1),
    Loaded("connector", 5.0, "LayerwisePushConnector"),
    Loaded("device", 0.1, "cpu"),
    Loaded("host", 0.1, "10.0.0.1"),
]


ENDED = Ran("", "")
GONE = "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory\nmore"


def loading_levels(loaded: list[Loaded], ran: Ran = ENDED, on_npu: bool = False) -> dict[str, Level]:
    findings = loading.judge(loaded, ran, on_npu)
    return {finding.check: finding.level for finding in findings if finding.level is not Level.OK}


def test_loading() -> None:
    assert loading_levels(LOADED) == {}
    assert loading_levels(LOADED, on_npu=True) == {"loading.device": Level.ERROR}
    failed = [Loaded("mooncake", 0.1, error=GONE), Loaded("host", 0.1, "0.0.0.0")]
    assert "apt-get install libibverbs1" in loading.judge(failed, ENDED, False)[0].action
    assert loading_levels(failed) == {"loading.mooncake": Level.ERROR, "loading.host": Level.ERROR}
    assert loading_levels([Loaded("ops", 0.0, missing="torch")]) == {"loading.ops": Level.NOTE}
    assert loading_levels([Loaded("host", 0.1, "127.0.0.1")]) == {"loading.host": Level.WARNING}


def test_what_parts_say_counts_only_if_they_were_loaded() -> None:
    loaded = [
        Loaded("npus", 0.1, "4,5"),
        Loaded("host", 0.1, "x", error="no"),
        Loaded("device", 0.0, missing="connector"),
    ]
    assert loading.details(loaded) == {"npus": "4,5"}


def test_kernels_that_cannot_be_loaded_are_an_error() -> None:
    assert loading_levels([Loaded("kernels", 0.1, "/site/libvllm_ascend_pd_npu.so")], on_npu=True) == {}
    [not_built] = loading.judge([Loaded("kernels", 0.1)], ENDED, on_npu=True)
    assert (not_built.level, not_built.found.split(":")[0]) == (Level.NOTE, "the NPU's kernels were not built")
    reason = "OSError: libvllm_ascend_pd_kernels.so: cannot open shared object file"
    [broken] = loading.judge([Loaded("kernels", 0.1, error=reason)], ENDED, on_npu=True)
    assert (broken.check, broken.level) == ("loading.kernels", Level.ERROR)
    assert broken.found == f"the NPU's kernels cannot be loaded: {reason}"
    assert "set_env.sh" in broken.action


def test_loading_that_crashes_names_the_part() -> None:
    ran = Ran("", "Fatal: undefined symbol", "was ended by SIGSEGV")
    [crash] = [finding for finding in loading.judge(LOADED[:2], ran, False) if finding.level is Level.ERROR]
    assert "stopped at mooncake: the process was ended by SIGSEGV (Fatal: undefined symbol)" in crash.found
    assert "libibverbs1" in crash.action


def test_a_torch_npu_that_does_not_load_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's own process never imports torch, which would load torch_npu (`test_names.py`)."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    loaded, ran = loading.load_all()
    levels = loading_levels(loaded, ran, on_npu=True)
    assert levels.pop("loading.torch_npu") is Level.ERROR
    assert {levels[f"loading.{part}"] for part in ("npus", "ops", "kernels", "connector", "device", "host")} == {
        Level.NOTE
    }
    [wrong] = [each for each in loading.judge(loaded, ran, True) if each.check == "loading.torch_npu"]
    assert "libascendcl.so" in wrong.found
    assert "set_env.sh" in wrong.action
