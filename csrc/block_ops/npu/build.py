# SPDX-License-Identifier: Apache-2.0
"""Builds the NPU's kernels where that is possible. Used by setup.py.

Environment:
    VLLM_ASCEND_PD_NPU_KERNELS: "0" leaves them out, "1" makes it an error when they cannot be built; else they
        are built where CANN and torch_npu are.
    ASCEND_HOME_PATH, ASCEND_TOOLKIT_HOME: CANN's folder, as its set_env.sh sets them.
    SOC_VERSION: the chip to build for, for example Ascend910B3; else that of the NPU in this machine.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent

CANN_HOMES = (Path("/usr/local/Ascend/cann"), Path("/usr/local/Ascend/ascend-toolkit/latest"))
"""Where CANN's installers put it: from version 9 on, and before."""

COMPILERS = (
    "tools/tikcpp/ascendc_kernel_cmake/ascendc.cmake",
    "compiler/tikcpp/ascendc_kernel_cmake/ascendc.cmake",
    "ascendc_devkit/tikcpp/samples/cmake/ascendc.cmake",
    "bin/bisheng",
    "*/bin/bisheng",
    "*/*/bin/bisheng",
)
"""Any of these is in a CANN that can compile kernels, and none in one that can only run them."""

ARCHITECTURES = {"ascend910b": "dav-2201", "ascend910_93": "dav-2201", "ascend950": "dav-3510"}
"""By how the chip's name begins: Atlas A2, A3 and A5. Chips before A2 have no DataCopyPad."""


class NotPossible(Exception):
    """Why the kernels cannot be built here, in a sentence for the person who installs."""


@dataclass(frozen=True)
class Target:
    """`cann`: its folder. `soc` and `arch`: the chip, as CANN and its compiler name it."""

    cann: Path
    soc: str
    arch: str


def find_cann(environ: Mapping[str, str], homes: Iterable[Path] = CANN_HOMES) -> Path:
    """CANN's folder. What the environment names is taken or refused; only without it is `homes` searched."""
    named = [
        Path(environ[name]).absolute() for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if environ.get(name)
    ]
    candidates = named[:1] or [home for home in homes if home.exists()]
    for home in candidates:
        if any(next(home.glob(pattern), None) for pattern in COMPILERS):
            return home
    if candidates:
        raise NotPossible(f"CANN in {candidates[0]} has no compiler for kernels (the toolkit package has one)")
    raise NotPossible("CANN was not found: ASCEND_HOME_PATH is not set (source CANN's set_env.sh)")


def npu_smi(*args: str) -> str:
    """Raises OSError or subprocess.SubprocessError."""
    return subprocess.run(["npu-smi", *args], capture_output=True, text=True, check=True, timeout=60).stdout


def find_soc(environ: Mapping[str, str], npu_smi: Callable[..., str] = npu_smi) -> str:
    """The chip's name as CANN spells it: Ascend910B3 (A2), Ascend910_9392 (A3)."""
    if environ.get("SOC_VERSION"):
        return environ["SOC_VERSION"]
    hint = "set SOC_VERSION, for example to Ascend910B3"
    try:
        board_of = ("info", "-t", "board", "-i", _fields(npu_smi("info", "-l")).get("NPU ID", "0"))
        board = _fields(npu_smi(*board_of))
        if not board.get("Chip Name"):  # A2 and A3 name the chip only with `-c`, A5 only without
            board = _fields(npu_smi(*board_of, "-c", "0"))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotPossible(f"npu-smi does not tell the chip ({error}): {hint}") from error
    chip, npu_name = board.get("Chip Name", ""), board.get("NPU Name", "")
    if not chip:
        raise NotPossible(f"npu-smi does not tell the chip (no Chip Name in its answer): {hint}")
    if "a2g3" in chip.lower():
        return "Ascend910B1"  # as vllm-ascend reads this name of an A2
    if not chip.startswith("Ascend"):
        chip = f"Ascend{chip}"
    return f"{chip}_{npu_name}" if npu_name[:1].isdigit() else chip


def _fields(text: str) -> dict[str, str]:
    """The `key : value` lines of npu-smi, the first of each key."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def find_arch(soc: str) -> str:
    for begin, arch in ARCHITECTURES.items():
        if soc.lower().startswith(begin):
            return arch
    raise NotPossible(f"there are no kernels for {soc}; they run on Atlas A2, A3 and A5")


def find_target(environ: Mapping[str, str]) -> Target:
    """What to build for in this environment. Raises `NotPossible`."""
    cann = find_cann(environ)
    if importlib.util.find_spec("torch_npu") is None:
        raise NotPossible("torch_npu is not installed")
    soc = find_soc(environ)
    return Target(cann, soc, find_arch(soc))


def build_commands(target: Target, build: Path, output: Path, jobs: str) -> list[list[str]]:
    """Configures and builds in `build`, then installs into `output`."""
    import torch

    torch_npu = importlib.util.find_spec("torch_npu")
    assert torch_npu is not None
    assert torch_npu.origin is not None
    settings = {
        "ASCEND_HOME_PATH": target.cann,
        "ASCEND_PYTHON_EXECUTABLE": sys.executable,
        "SOC_VERSION": target.soc,
        "NPU_ARCH": target.arch,
        "TORCH_PATH": Path(torch.__file__).parent,
        "TORCH_NPU_PATH": Path(torch_npu.origin).parent,
        "CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        "OUTPUT": output,
        # Where CANN's own install rules write.
        "CMAKE_INSTALL_PREFIX": build / "cann",
    }
    # CANN's ascendc_library reads what CMake writes for make.
    configure = ["cmake", "-G", "Unix Makefiles", "-S", str(SOURCE), "-B", str(build)]
    return [
        [*configure, *(f"-D{name}={value}" for name, value in settings.items())],
        ["cmake", "--build", str(build), "--parallel", jobs],
        ["cmake", "--install", str(build)],
    ]


def build_if_possible(build: Path, output: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Puts the library into `output`, or says why not. Raises RuntimeError when it must be built and cannot, and
    `subprocess.CalledProcessError` when a compiler fails."""
    wanted = environ.get("VLLM_ASCEND_PD_NPU_KERNELS", "")
    if wanted == "0":
        return _left_out("VLLM_ASCEND_PD_NPU_KERNELS is 0")
    try:
        target = find_target(environ)
    except NotPossible as reason:
        if wanted == "1":
            raise RuntimeError(f"VLLM_ASCEND_PD_NPU_KERNELS is 1, but: {reason}") from reason
        return _left_out(str(reason))
    _say(f"building for {target.soc} ({target.arch}) with CANN in {target.cann}")
    shutil.rmtree(build, ignore_errors=True)  # CMake would remember another CANN
    # CANN's CMake modules run Python programs in CANN's folder: those shall leave no __pycache__ there.
    environ = {**environ, "ASCEND_HOME_PATH": str(target.cann), "PYTHONDONTWRITEBYTECODE": "1"}
    for command in build_commands(target, build, output, jobs=environ.get("MAX_JOBS", "2")):
        subprocess.run(command, check=True, env=environ)
    return True


def _left_out(reason: str) -> bool:
    _say(f"not built: {reason}. On an NPU, KV will be regrouped by torch_npu's operators.")
    return False


def _say(what: str) -> None:
    print(f"vllm-ascend-pd: NPU kernels: {what}", file=sys.stderr, flush=True)
