# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks: the sides that are compared, stand-ins and printing. Import it before the tests' harness."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path += [path for path in (str(_ROOT), str(_ROOT / "tests")) if path not in sys.path]
