# SPDX-License-Identifier: Apache-2.0
"""Versions that were tested together. They are those of `requirements/`, which a test checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_PYTHON = (3, 11)
"""The same as `requires-python` in pyproject.toml."""

VLLM = ("0.23.0", "0.32.0")
"""The versions that `connector/vllm_view.py` is for."""

CANN = "9.1.0"
"""The versions that vllm-ascend 0.23.0 is built for."""

MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-efa",
    "mooncake-transfer-engine-efa-non-cuda",
    "mooncake-transfer-engine-musa",
)
"""Distributions with the Python package `mooncake`. Only the second one has the Ascend transport."""

MOONCAKE_NPU = "mooncake-transfer-engine-npu"

MOONCAKE_NPU_TESTED = ("0.3.11.post1", "0.3.13.post1")
"""The versions in vllm-ascend 0.23.0's images and in requirements/npu.txt."""


@dataclass(frozen=True)
class Stack:
    """The distributions for one kind of machine, and the file that pins them."""

    name: str
    file: str
    pins: Mapping[str, str]


CPU = Stack(
    "vLLM's CPU backend",
    "requirements/cpu.txt",
    {"torch": "2.13.0", "vllm": "0.32.0", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"},
)
NPU = Stack(
    "vllm-ascend",
    "requirements/npu.txt",
    {
        "torch": "2.10.0",
        "torch-npu": "2.10.0.post4",
        "vllm": "0.23.0",
        "vllm-ascend": "0.23.0.post1",
        MOONCAKE_NPU: "0.3.13.post1",
    },
)


def stack_of(installed: Mapping[str, str]) -> Stack:
    """Returns the stack that the machine was set up for, judged by its distributions."""
    return NPU if {"torch-npu", "vllm-ascend", MOONCAKE_NPU} & installed.keys() else CPU
