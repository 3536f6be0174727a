# SPDX-License-Identifier: Apache-2.0
"""What hardware's fused operators take: types of tensors, and sizes of heads. Others are refused, as on hardware.

Sources: torch_npu's API reference (op-plugin, `docs/zh/custom_APIs/torch_npu`), the operators' own checks in CANN's
ops-transformer (`prompt_flash_attention_tiling.cpp`), and `atb_ops_info.ini` of Ascend Transformer Boost.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
CACHED = (*HALF, torch.int8)
FLOAT = (*HALF, torch.float32)


def types(operator: str, taken: Collection[torch.dtype], **tensors: Tensor | None) -> None:
    """All of `tensors` are of one of the types that the operator takes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in taken:
            refuse(operator, f"{name} is {_name(tensor.dtype)}, not {' or '.join(map(_name, taken))}")


def same_type(operator: str, **tensors: Tensor | None) -> None:
    """All of `tensors` are of one type."""
    given = {name: _name(tensor.dtype) for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        refuse(operator, f"types differ: {given}")


def norm_weight(operator: str, x: Tensor, gamma: Tensor) -> None:
    types(operator, FLOAT, x=x)
    if gamma.dtype not in (x.dtype, torch.float32):
        refuse(operator, f"x is {_name(x.dtype)} and gamma {_name(gamma.dtype)}")


def attention(operator: str, query: Tensor, key: Tensor, value: Tensor, *ropes: Tensor | None) -> None:
    types(operator, HALF, query=query, key=key, value=value)
    same_type(operator, query=query, key=key, value=value, **{f"rope {i}": rope for i, rope in enumerate(ropes)})


def head_sizes(operator: str, query: int, key: int, value: int, rope: int) -> None:
    """Of layout TND. MLA's latent has 512, and a rope part of 64."""
    sizes = (query, key, value, rope)
    if sizes not in {(64, 64, 64, 0), (128, 128, 128, 0), (192, 192, 192, 0), (192, 192, 128, 0)} | {
        (128, 128, 128, 64),
        (512, 512, 512, 64),
    }:
        refuse(operator, f"heads of sizes {query} (query), {key} (key), {value} (value) and {rope} (rope)")


def refuse(operator: str, reason: str) -> None:
    """Raises what torch_npu raises where CANN refuses a call, before anything is launched."""
    raise RuntimeError(f"{operator}: NPU function error, error code is 561002 (emulated): {reason}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
