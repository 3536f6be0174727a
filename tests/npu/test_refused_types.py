# SPDX-License-Identifier: Apache-2.0
"""The emulated operators refuse what an NPU's operators refuse: types, float32 in attention, and sizes of heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from operator_cases import half, on, tensors

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

SLOTS = torch.tensor([5, 0], dtype=torch.int32)


def attend(q: Any, k: Any, v: Any, **of: Any) -> None:
    import torch_npu

    lengths = {"actual_seq_lengths": (2,), "actual_seq_lengths_kv": (2,)}
    torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=4, num_key_value_heads=2, scale=0.3, input_layout="TND", sparse_mode=3, **lengths, **of
    )


def rotate(q: Any, k: Any, cache: Any) -> None:
    import torch_npu

    torch_npu._npu_rotary_embedding(torch.tensor([1, 0]).npu(), q, k, 8, cache, True)


def store(k: Any, v: Any, k_cache: Any, v_cache: Any) -> None:
    import torch_npu

    torch_npu._npu_reshape_and_cache(k, v, k_cache, v_cache, SLOTS.npu())


def normalize(x: Any, residual: Any, gamma: Any) -> None:
    import torch_npu

    torch_npu.npu_add_rms_norm(x, residual, gamma)


def load(k_cache: Any, v_cache: Any, table: Any, lengths: Any, k: Any, v: Any) -> None:
    import torch_npu

    torch_npu.atb.npu_paged_cache_load(k_cache, v_cache, table, lengths, key=k, value=v)


HEADS_OF_64 = ((2, 4, 64), (2, 2, 64), (2, 2, 64))
HEADS_OF_32 = ((2, 4, 32), (2, 2, 32), (2, 2, 32))
CACHES = ((2, 2, 8), (2, 2, 8), (3, 4, 2, 8), (3, 4, 2, 8))
ROTATED = ((2, 16), (2, 8), (10, 8))
LOADED = half((6, 4, 1, 8), (6, 4, 1, 2), (2, 1, 8), (2, 1, 2))
NORMALIZED = ((5, 8), (5, 8), (8,))

TAKEN = [
    (attend, half(*HEADS_OF_64)),
    (rotate, half(*ROTATED)),
    (rotate, (*tensors(*ROTATED[:2], dtype=torch.float16), *tensors(ROTATED[2]))),
    (store, half(*CACHES)),
    (normalize, half(*NORMALIZED)),
    (normalize, tensors(*NORMALIZED)),
]
REFUSED = [
    ("query is float32", attend, tensors(*HEADS_OF_64)),
    ("value is float32", attend, (*half(*HEADS_OF_64[:2]), *tensors(HEADS_OF_64[2]))),
    ("types differ", attend, (*half(*HEADS_OF_64[:2]), *tensors(HEADS_OF_64[2], dtype=torch.float16))),
    ("heads of sizes 32", attend, half(*HEADS_OF_32)),
    ("query is float32", rotate, tensors(*ROTATED)),
    ("types differ", rotate, (*half(*ROTATED[:2]), *tensors(ROTATED[2]))),
    ("key is float32", store, tensors(*CACHES)),
    ("types differ", store, (*half(*CACHES[:2]), *tensors(*CACHES[2:], dtype=torch.float16))),
    ("types differ", normalize, (*half(*NORMALIZED[:2]), *tensors(NORMALIZED[2]))),
    (
        "context_lens is int64",
        load,
        (*LOADED[:2], torch.tensor([[5]], dtype=torch.int32), torch.tensor([2]), *LOADED[2:]),
    ),
]


def _id(value: Any) -> str | None:
    return value if isinstance(value, str) else getattr(value, "__name__", "")


@pytest.mark.parametrize(("run", "arguments"), TAKEN, ids=_id)
def test_taken(run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    run(*on("npu", arguments))


@pytest.mark.parametrize(("reason", "run", "arguments"), REFUSED, ids=_id)
def test_refused(reason: str, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match=reason):
        run(*on("npu", arguments))
