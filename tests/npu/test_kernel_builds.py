# SPDX-License-Identifier: Apache-2.0
"""The NPU's library as setup.py builds it, with CANN 9.1 and with CANN before it.

It links, loads and runs for every user, and the build writes only where it should. CANN is the toolkit of
tests/ascendc_twin; torch_npu is real.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from make_toolkit import MODULES

import cann_on_host
import vllm_ascend_pd
from harness.pool import long
from kernel_builds import REPOSITORY, Builds, Built, kernels_cannot_be_built

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.skipif(**kernels_cannot_be_built())]

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user; the others test this one")

WAYS = {
    "find_package(ASC)": "AscendC kernels: find_package(ASC), dav-2201",
    "ascendc_library": f"{MODULES}/ascendc.cmake, Ascend910B3",
}
NEW, *OLD = WAYS
"""The short form builds with the new one alone."""


@pytest.fixture(params=[NEW, *map(long, OLD)])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expect_bound(built: Built, user: int | None = None) -> None:
    """Loads the library and all that it needs, and binds every symbol, as an engine does when it starts."""
    site_packages = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    folders = [site_packages / name / "lib" for name in ("torch", "torch_npu")]
    folders += [built.toolkit / "lib64", cann_on_host.library_folder()]
    env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(str(folder.resolve()) for folder in folders)}
    done = subprocess.run(["ldd", "-r", built.library], env=env, user=user, capture_output=True, text=True, check=True)
    bound = done.stdout + done.stderr
    assert f"libvllm_ascend_pd_kernels.so => {built.library.parent}/" in bound
    assert "not found" not in bound
    # That torch's binding to Python wants Python is right.
    assert not re.search(r"undefined symbol: .*libvllm_ascend_pd", bound), bound


def run_library(built: Built, *arguments: str) -> None:
    folders = [REPOSITORY, REPOSITORY / "tests" / "cann_on_host"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}
    command = [sys.executable, REPOSITORY / "tests" / "ascendc_twin" / "check_library.py", built.library, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_library_is_built_with_what_cann_has(builds: Builds, way: str) -> None:
    assert WAYS[way] in builds[way].printed
    assert re.search(r"c\+\+ .* -O3 .*/npu_ops\.cpp\n", builds[way].printed), "without optimisation"


def test_every_symbol_is_found(builds: Builds, way: str) -> None:
    expect_bound(builds[way])


@pytest.mark.parametrize(("way", "task_queue"), [(NEW, "0"), *(long(way, "1") for way in OLD)])
def test_ops_on_npu_tensors(builds: Builds, way: str, task_queue: str) -> None:
    run_library(builds[way], task_queue)


def test_nothing_is_written_but_the_build_and_the_libraries(builds: Builds, way: str) -> None:
    built = builds[way]
    assert built.written_elsewhere == []
    assert sorted(path.name for path in built.library.parent.iterdir()) == [
        "libvllm_ascend_pd_kernels.so",
        "libvllm_ascend_pd_npu.so",
    ]


@needs_root
def test_another_user_loads_what_root_built(builds: Builds, way: str) -> None:
    expect_bound(builds[way], NOBODY)
    if way == "find_package(ASC)":  # it takes some seconds
        run_library(builds[way], "1", str(NOBODY))


def test_what_could_not_be_loaded_is_not_built(builds: Builds) -> None:
    """This CANN lacks a library that its compiler links into kernels."""
    toolkit = builds.toolkit("find_package(ASC)", "cann without a runtime")
    runtime = toolkit / "lib64" / "libascendc_runtime.a"
    runtime.unlink()
    subprocess.run(["ar", "qc", runtime], check=True)
    with pytest.raises(RuntimeError, match="undefined reference to `ascendc_twin_queue"):
        builds.build("find_package(ASC)", toolkit)


@pytest.fixture
def package(builds: Builds, tmp_path: Path) -> Path:
    """This package with a library beside it that the loader refuses."""
    copy = tmp_path / "vllm_ascend_pd"
    shutil.copytree(Path(vllm_ascend_pd.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(builds["find_package(ASC)"].library, copy)
    return copy


def test_a_library_that_cannot_be_loaded_is_an_error_of_doctor(package: Path) -> None:
    program = """
import torch, torch_npu
from vllm_ascend_pd.tools.doctor import loading
finding = loading.load("kernels")
print(finding.check, finding.level.value, finding.found)
"""
    printed = in_package(package, program)
    assert re.fullmatch(
        r"loading.kernels error the NPU's kernels cannot be loaded: OSError: .*libvllm_ascend_pd_kernels\.so: "
        r"cannot open shared object file.*",
        printed.splitlines()[-1],
    )


def in_package(package: Path, program: str) -> str:
    env = os.environ | {"PYTHONPATH": str(package.parent)}
    command: Sequence[str] = [sys.executable, "-c", program]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=package.parent).stdout
