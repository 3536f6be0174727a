# SPDX-License-Identifier: Apache-2.0
"""For all tests, and the processes that they start: owned objects check which thread calls them, a secret that this
user has is not read, engines are on loopback, and torch computes on one thread."""

import atexit
import gc
import os
import sys
import tempfile

import pytest

gc.disable()  # until all is imported: nothing of that is garbage, and looking takes a quarter of the time
os.environ["VLLM_ASCEND_PD_CHECK_THREADS"] = "1"  # before the package is imported
_config = tempfile.TemporaryDirectory(prefix="config-")
os.environ["XDG_CONFIG_HOME"] = _config.name
os.environ["VLLM_HOST_IP"] = "127.0.0.1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once; OpenMP's threads spin while they wait


def pytest_collection_finish() -> None:
    if "vllm" in sys.modules:
        from harness.models import inspect_here

        inspect_here()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()  # nor is what was imported and collected looked at again
    gc.enable()
    atexit.register(gc.unfreeze)  # or nanobind lists all its types as leaks
