# SPDX-License-Identifier: Apache-2.0
"""For all tests, and the processes that they start: owned objects check which thread calls them."""

import os

os.environ["VLLM_ASCEND_PD_CHECK_THREADS"] = "1"  # before the package is imported
