# SPDX-License-Identifier: Apache-2.0
"""Builds the regroup ops; everything else is in pyproject.toml."""

import os
import sys

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
    """`vllm_ascend_pd._C`: importing it registers the ops. A device adds its sources and libraries here."""
    return CppExtension(
        "vllm_ascend_pd._C",
        sources=["csrc/regroup/binding.cpp", "csrc/regroup/cpu/regroup_cpu.cpp"],
        depends=["csrc/regroup/regroup.h"],
        # No -march=native: wheels travel.
        extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra", *OPENMP],
        extra_link_args=OPENMP,
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
