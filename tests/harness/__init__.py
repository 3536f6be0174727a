# SPDX-License-Identifier: Apache-2.0
"""Starts real vLLM engines and talks to them: shared by the end-to-end tests, the benchmarks and the demo."""

import pkgutil
import sys

if "pytest" in sys.modules:  # checks that several tests share say what they found, as the tests' own do
    import pytest

    pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
