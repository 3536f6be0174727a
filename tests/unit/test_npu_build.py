# SPDX-License-Identifier: Apache-2.0
"""What setup.py finds out before it builds the NPU's kernels, with made-up folders and answers of npu-smi."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "csrc" / "regroup" / "npu" / "build.py"

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


@pytest.mark.parametrize("file", [ASCENDC_CMAKE, "bin/bisheng", "compiler/ccec_compiler/bin/bisheng"])
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_cann_named_by_the_environment(build: ModuleType, tmp_path: Path, variable: str, file: str) -> None:
    home = cann(tmp_path / "cann", file)
    assert build.find_cann({variable: str(home)}, homes=[]) == home


def test_cann_in_its_usual_place(build: ModuleType, tmp_path: Path) -> None:
    home = cann(tmp_path / "latest", ASCENDC_CMAKE)
    assert build.find_cann({}, homes=[tmp_path / "missing", home]) == home


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


def test_chip_by_the_environment(build: ModuleType) -> None:
    assert build.find_soc({"SOC_VERSION": "Ascend910B1"}, pytest.fail) == "Ascend910B1"


def test_no_npu(build: ModuleType) -> None:
    def missing(*_: str) -> str:
        raise FileNotFoundError("npu-smi")

    with pytest.raises(build.NotPossible, match="set SOC_VERSION"):
        build.find_soc({}, missing)
    with pytest.raises(build.NotPossible, match="no Chip Name in its answer"):
        build.find_soc({}, lambda *_: "")


@pytest.mark.parametrize(
    ("soc", "arch"),
    [("Ascend910B3", "dav-2201"), ("ascend910_9392", "dav-2201"), ("Ascend950PR_9589", "dav-3510")],
)
def test_architecture(build: ModuleType, soc: str, arch: str) -> None:
    assert build.find_arch(soc) == arch


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


def test_cmake_is_told_everything(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = cann(tmp_path / "cann", ASCENDC_CMAKE)
    torch_npu = cann(tmp_path / "site" / "torch_npu", "__init__.py")
    monkeypatch.syspath_prepend(str(torch_npu.parent))
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    environ = {"ASCEND_HOME_PATH": str(home), "SOC_VERSION": "Ascend910B3"}
    assert build.build_if_possible(tmp_path / "build", tmp_path / "out", environ)
    configure = commands[0]
    assert configure[:7] == [
        *("cmake", "-G", "Unix Makefiles", "-S", str(SOURCE.parent), "-B", str(tmp_path / "build"))
    ]
    for setting in (
        f"ASCEND_HOME_PATH={home}",
        "SOC_VERSION=Ascend910B3",
        "NPU_ARCH=dav-2201",
        f"TORCH_NPU_PATH={torch_npu}",
        f"OUTPUT={tmp_path / 'out'}",
        f"CMAKE_INSTALL_PREFIX={tmp_path / 'build' / 'cann'}",
    ):
        assert f"-D{setting}" in configure
    assert [command[1] for command in commands[1:]] == ["--build", "--install"]
