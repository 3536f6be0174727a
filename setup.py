# SPDX-License-Identifier: Apache-2.0
"""Builds the block ops; everything else is in pyproject.toml.

Engines need the ops, compiled against the torch that will load them (`--no-build-isolation`). The proxy and the tools
need neither. So without torch, the package is built without them, and an engine says so at start.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import setuptools
from setuptools import Extension, setup

# An older one refuses pyproject.toml's license, and does not say that it is too old.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"setuptools 77 or newer is needed, not {setuptools.__version__}: run `pip install -U setuptools` first")

# at::parallel_for runs on one thread unless the including file is compiled with OpenMP.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []


def npu_build() -> ModuleType:
    path = Path(__file__).parent / "csrc" / "block_ops" / "npu" / "build.py"
    spec = importlib.util.spec_from_file_location("npu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ops() -> dict[str, Any]:
    """Returns `setup`'s arguments for the ops."""
    if importlib.util.find_spec("torch") is None:
        print("vllm-ascend-pd: torch is not installed here, so the block ops that engines need are left out")
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    os.environ.setdefault("MAX_JOBS", "2")

    class Build(BuildExtension):
        """Also builds the NPU's library, beside `_C`, where CANN is."""

        def run(self) -> None:
            super().run()
            output = Path(self.get_ext_fullpath("vllm_ascend_pd._C")).resolve().parent
            npu_build().build_if_possible(Path(self.build_temp).resolve() / "npu", output)

    # Importing it registers the ops and their CPU implementations.
    extension: Extension = CppExtension(
        "vllm_ascend_pd._C",
        sources=[
            "csrc/block_ops/binding.cpp",
            "csrc/block_ops/cpu/regroup_cpu.cpp",
            "csrc/block_ops/cpu/sum_cpu.cpp",
        ],
        depends=["csrc/block_ops/regroup.h", "csrc/block_ops/sum.h", "csrc/block_ops/arguments.h"],
        # No -march=native: wheels travel.
        extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra", *OPENMP],
        extra_link_args=OPENMP,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setup(**ops())
