# SPDX-License-Identifier: Apache-2.0
"""For all tests, and the processes that they start: owned objects check which thread calls them."""

import os
import sys

os.environ["VLLM_ASCEND_PD_CHECK_THREADS"] = "1"  # before the package is imported


def pytest_collection_finish() -> None:
    if "vllm" in sys.modules:
        from harness.models import inspect_here

        inspect_here()
