# SPDX-License-Identifier: Apache-2.0
"""Tensors for the emulated operators' tests, and comparisons with what CPU torch computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(shapes))
    return tuple((torch.randn(shape, generator=generator) * 8).to(dtype) for shape in shapes)


def on(device: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(on(device, item) for item in value)
    return value


def assert_same(run: Callable[..., Any], *arguments: Any) -> None:
    """Checks that `run` gives the same on the NPU and on the CPU, bit by bit, and changes its arguments alike."""
    expected_arguments, arguments = on("cpu", arguments), on("npu", arguments)
    expected, got = run(*expected_arguments), run(*arguments)
    torch.testing.assert_close(on("cpu", got), expected, rtol=0, atol=0)
    torch.testing.assert_close(on("cpu", arguments), expected_arguments, rtol=0, atol=0)


def half(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns small bfloat16 tensors."""
    return tuple((x / 8).to(torch.bfloat16) for x in tensors(*shapes))


def near(got: Tensor, expected: Tensor) -> None:
    """Like `close`, for results in bfloat16."""
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=1e-2, atol=1e-2)


def close(got: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=1e-4, atol=atol)
