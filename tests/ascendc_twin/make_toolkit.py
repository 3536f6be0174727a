#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python make_toolkit.py FOLDER [--without-asc]: a CANN toolkit in FOLDER with the twin for a device, to be named as
ASCEND_HOME_PATH.

It has what CANN 9.1 has, in the same places: `find_package(ASC)` with a compiler, `ascendc_library`, the libraries
that both link. `--without-asc` leaves out the first, as CANN before 9.1 does. Needs torch_npu, for ACL's headers, and
the emulated CANN libraries.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD_PY = HERE.parents[1] / "csrc" / "block_ops" / "npu" / "build.py"
LIBRARY = "libvllm_ascend_pd_npu.so"
MODULES = "compiler/tikcpp/ascendc_kernel_cmake"

EMPTY_LIBRARIES = (
    *("runtime", "profapi", "unified_dlog", "mmpa", "ascend_dump", "c_sec", "error_manager"),
    *("tiling_api", "register", "platform", "ge_common_base"),
)
"""Linked by name; what they have in CANN is in `runtime.cpp` and in the emulated libascendcl.so."""


def emulated_libascendcl() -> Path:
    folder = Path(os.environ.get("CANN_ON_HOST_LIB") or Path(sys.prefix, "cann_on_host", "lib"))
    return folder / "libascendcl.so"


def make_toolkit(folder: Path, asc: bool = True) -> Path:
    """Fills `folder`, which must not exist, and returns it. Raises `subprocess.CalledProcessError`."""
    torch_npu = importlib.util.find_spec("torch_npu")
    if torch_npu is None or torch_npu.origin is None:
        raise RuntimeError("torch_npu is not installed")
    template, modules = HERE / "toolkit", folder / MODULES
    shutil.copytree(template / "cmake", modules)
    asc_config = folder / "lib64" / "cmake" / "asc-config.cmake"
    asc_config.parent.mkdir(parents=True)
    (modules / "asc-config.cmake").rename(asc_config)
    if not asc:
        asc_config.unlink()

    include = folder / "include"
    include.mkdir()
    for header in (HERE / "kernel_operator.h", template / "twin_launch.h"):
        shutil.copy(header, include)
    acl = Path(torch_npu.origin).parent / "include" / "third_party" / "acl" / "inc"
    shutil.copytree(acl, include, dirs_exist_ok=True)

    compiler = folder / f"{platform.machine()}-linux" / "ccec_compiler" / "bin" / "bisheng"
    compiler.parent.mkdir(parents=True)
    shutil.copy(template / "bisheng", compiler)

    lib = folder / "lib64"
    (lib / "libascendcl.so").symlink_to(emulated_libascendcl())
    for name in EMPTY_LIBRARIES:
        (lib / f"lib{name}.so").write_text("/* a linker script without input */\n")
    with tempfile.TemporaryDirectory() as objects:
        runtime = Path(objects, "runtime.o")
        compile_runtime = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-fPIC", f"-I{include}"]
        subprocess.run([*compile_runtime, "-c", template / "runtime.cpp", "-o", runtime], check=True)
        subprocess.run(["ar", "qc", lib / "libascendc_runtime.a", runtime], check=True)
    return folder


def build_kernels(toolkit: Path, build: Path, output: Path, **environ: str) -> tuple[Path, str]:
    """The NPU's library as setup.py builds it, and what the build prints. Raises RuntimeError."""
    program = (
        "import runpy, sys; from pathlib import Path\n"
        "build = runpy.run_path(sys.argv[1], run_name='npu_build')['build_if_possible']\n"
        "sys.exit(not build(Path(sys.argv[2]), Path(sys.argv[3])))"
    )
    env = os.environ | {
        "ASCEND_HOME_PATH": str(toolkit),
        "SOC_VERSION": "Ascend910B3",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", program, str(BUILD_PY), str(build), str(output)]
    done = subprocess.run(command, env=env | environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the kernels could not be built:\n{done.stdout}{done.stderr}")
    return output / LIBRARY, done.stdout + done.stderr


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without-asc", action="store_true")
    chosen = parser.parse_args()
    make_toolkit(chosen.folder, asc=not chosen.without_asc)
