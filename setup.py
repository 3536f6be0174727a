# SPDX-License-Identifier: Apache-2.0
"""Builds the block ops; everything else is in pyproject.toml."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise RuntimeError(
        "vllm-ascend-pd compiles against the torch that will load it, and torch cannot be imported here: "
        "install torch first, then run `pip install --no-build-isolation -e .`"
    ) from error

os.environ.setdefault("MAX_JOBS", "2")

# at::parallel_for runs on one thread unless the including file is compiled with OpenMP.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []


def extension() -> Extension:
    """`vllm_ascend_pd._C`: importing it registers the ops and their CPU implementations."""
    return CppExtension(
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


def npu_build() -> ModuleType:
    path = Path(__file__).parent / "csrc" / "block_ops" / "npu" / "build.py"
    spec = importlib.util.spec_from_file_location("npu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Build(BuildExtension):
    """Also builds the NPU's library, beside `_C`, where CANN is."""

    def run(self) -> None:
        super().run()
        output = Path(self.get_ext_fullpath("vllm_ascend_pd._C")).resolve().parent
        npu_build().build_if_possible(Path(self.build_temp).resolve() / "npu", output)


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
