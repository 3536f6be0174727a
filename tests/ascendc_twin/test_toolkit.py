# SPDX-License-Identifier: Apache-2.0
"""The NPU's library as setup.py builds it, with the toolkit in this folder for CANN: its host code and kernels on
NPU tensors of the real torch_npu, over the emulated CANN libraries. Needs the environment that has both."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
EMULATED = Path(os.environ.get("CANN_ON_HOST_LIB") or Path(sys.prefix, "cann_on_host", "lib")) / "libascendcl.so"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="needs torch_npu"),
    pytest.mark.skipif(
        not EMULATED.exists() or not hasattr(ctypes.CDLL(str(EMULATED)), "aclrtGetDeviceInfo"),
        reason="needs emulated CANN libraries that know aclrtGetDeviceInfo",
    ),
]

BUILD = """
import runpy, sys
from pathlib import Path
build = runpy.run_path(sys.argv[1], run_name="npu_build")
assert build["build_if_possible"](Path(sys.argv[2]) / "build", Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    environ = os.environ | {
        "ASCEND_HOME_PATH": str(HERE / "toolkit"),
        "SOC_VERSION": "Ascend910B3",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
    }
    source = REPOSITORY / "csrc" / "regroup" / "npu" / "build.py"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, source, folder], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "libvllm_ascend_pd_npu.so"


@pytest.mark.parametrize("queue", ["0", "1"], ids=["no task queue", "task queue"])
def test_ops_on_npu_tensors(library: Path, queue: str) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests/cann_on_host")])}
    done = subprocess.run(
        [sys.executable, HERE / "check_library.py", library, queue],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
