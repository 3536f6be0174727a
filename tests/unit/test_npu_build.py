# SPDX-License-Identifier: Apache-2.0
"""What setup.py finds out before it builds the NPU's kernels, with made-up folders and answers of npu-smi."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "csrc" / "block_ops" / "npu" / "build.py"

LIST = """
	Total Count                    : 2

	NPU ID                         : 3
	Chip Count                     : 1

	NPU ID                         : 4
	Chip Count                     : 1
"""
A2_BOARD = """
	NPU ID                         : 3
	Chip ID                        : 0
	Chip Type                      : Ascend
	Chip Name                      : 910B3
	NPU Name                       : NA
"""
A3_BOARD = """
	Chip Name                      : Ascend910
	NPU Name                       : 9392
"""
A5_BOARD = """
	Chip Name                      : Ascend950PR
	NPU Name                       : 9589
"""
A2G3_BOARD = """
	Chip Name                      : A2G3
"""
BOARD_WITHOUT_CHIP = """
	NPU ID                         : 3
	Product Name                   : NA
	Chip Count                     : 1
"""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("npu_build", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cann(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


ASCENDC_CMAKE = "compiler/tikcpp/ascendc_kernel_cmake/ascendc.cmake"


def test_cann_without_a_compiler(build: ModuleType, tmp_path: Path) -> None:
    runtime = cann(tmp_path / "runtime", "lib64/libascendcl.so")
    toolkit = cann(tmp_path / "toolkit", ASCENDC_CMAKE)
    with pytest.raises(build.NotPossible, match="runtime has no compiler for kernels"):
        build.find_cann({"ASCEND_HOME_PATH": str(runtime)}, homes=[toolkit])


def test_no_cann(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(build.NotPossible, match=r"source CANN's set_env\.sh"):
        build.find_cann({}, homes=[tmp_path / "missing"])


@pytest.mark.parametrize(
    ("board", "soc"), [(A2_BOARD, "Ascend910B3"), (A3_BOARD, "Ascend910_9392"), (A2G3_BOARD, "Ascend910B1")]
)
def test_chip_by_npu_smi(build: ModuleType, board: str, soc: str) -> None:
    answers = {
        ("info", "-l"): LIST,
        ("info", "-t", "board", "-i", "3"): BOARD_WITHOUT_CHIP,
        ("info", "-t", "board", "-i", "3", "-c", "0"): board,
    }
    assert build.find_soc({}, lambda *args: answers[args]) == soc


def test_chip_that_npu_smi_names_without_its_number(build: ModuleType) -> None:
    answers = {("info", "-l"): LIST, ("info", "-t", "board", "-i", "3"): A5_BOARD}
    assert build.find_soc({}, lambda *args: answers[args]) == "Ascend950PR_9589"


def test_no_npu(build: ModuleType) -> None:
    def missing(*_: str) -> str:
        raise FileNotFoundError("npu-smi")

    with pytest.raises(build.NotPossible, match="set SOC_VERSION"):
        build.find_soc({}, missing)
    with pytest.raises(build.NotPossible, match="no Chip Name in its answer"):
        build.find_soc({}, lambda *_: "")


def test_chip_without_kernels(build: ModuleType) -> None:
    with pytest.raises(build.NotPossible, match="no kernels for Ascend310P3; they run on Atlas A2, A3 and A5"):
        build.find_arch("Ascend310P3")


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"VLLM_ASCEND_PD_NPU_KERNELS": "0"}, "VLLM_ASCEND_PD_NPU_KERNELS is 0"),
        ({"ASCEND_HOME_PATH": "/missing"}, "CANN in /missing has no compiler"),
    ],
)
def test_what_is_left_out_is_said(
    build: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], environ: dict[str, str], reason: str
) -> None:
    assert not build.build_if_possible(tmp_path, tmp_path, environ)
    assert f"NPU kernels: not built: {reason}" in capfd.readouterr().err


def test_kernels_that_were_asked_for_must_be_built(build: ModuleType, tmp_path: Path) -> None:
    environ = {"VLLM_ASCEND_PD_NPU_KERNELS": "1", "ASCEND_HOME_PATH": "/missing"}
    with pytest.raises(RuntimeError, match="KERNELS is 1, but: CANN in /missing has no compiler"):
        build.build_if_possible(tmp_path, tmp_path, environ)
