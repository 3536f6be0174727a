# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of vLLM's that its model runner calls on the emulated NPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor


class SlotMappingKernel:
    """The Triton kernel `_compute_slot_mapping_kernel[grid](...)`, for the whole grid at once.

    vLLM's, which vllm-ascend 0.23 calls, and vllm-ascend 0.30's own, whose `BLOCKS_PER_KV_BLOCK` counts the kernels'
    blocks in one of the cache. The table that it gets here is in the kernels' blocks already.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(
            num_tokens: int,
            max_num_tokens: int,
            query_start_loc: Tensor,
            positions: Tensor,
            block_table: Tensor,
            block_table_stride: int,
            block_size: int,
            slot_mapping: Tensor,
            *,
            TOTAL_CP_WORLD_SIZE: int,
            TOTAL_CP_RANK: int,
            CP_KV_CACHE_INTERLEAVE_SIZE: int,
            PAD_ID: int,
            IS_CIRCULAR: bool = False,
            **tiles: int,
        ) -> None:
            assert TOTAL_CP_WORLD_SIZE == 1, "context parallelism is not emulated"
            assert not IS_CIRCULAR, "rings of tokens are not emulated"
            requests = grid[0] - 1  # the last program pads
            torch.ops.cann_on_host.slot_mapping(
                requests,
                num_tokens,
                max_num_tokens,
                query_start_loc,
                positions,
                block_table,
                block_size,
                slot_mapping,
                PAD_ID,
            )

        return run


class BatchMemcpyKernel:
    """vllm-ascend's `batch_memcpy_kernel[grid](...)`, which copies cached states of linear attention."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, **tiles: int) -> None:
            copies = [each.tolist() for each in (src_ptrs, dst_ptrs, sizes)]  # waits for what the stream has to do
            for source, destination, size in zip(*copies, strict=True):
                ctypes.memmove(destination, source, size)

        return run


def split_qkv_rmsnorm_mrope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: list[int],
    is_interleaved: bool,
    rope_dim: int | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    has_gate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """vllm-ascend's kernel of that name: Q and K of Qwen3-VL and Qwen3.5 normalized by head and rotated, V, and the
    gate, which Qwen3.5 has beside each head of Q.

    `cos_sin`: [3, tokens, rope_dim], for positions in time, height and width. Of a head, `rope_dim` elements rotate.
    """
    assert is_interleaved, "sections one after another are not emulated"
    assert q_bias is None, "biases are not emulated"
    time, height, width = cos_sin.float().unbind(0)
    chosen = time.unflatten(-1, (2, -1)).clone()  # cosines, then sines
    for offset, other in ((1, height), (2, width)):
        at = slice(offset, mrope_section[offset] * 3, 3)
        chosen[..., at] = other.unflatten(-1, (2, -1))[..., at]
    cos, sin = (part.unsqueeze(1) for part in chosen.unbind(1))

    def rotated(heads: Tensor, weight: Tensor) -> Tensor:
        heads = torch.nn.functional.rms_norm(heads.float(), (head_size,), weight.float(), eps)
        low, high, rest = heads.tensor_split((half := cos.shape[-1], 2 * half), -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1).flatten(1).to(qkv.dtype)

    gates = num_q_heads if has_gate else 0
    q, k, v = qkv.unflatten(-1, (-1, head_size)).split([num_q_heads + gates, num_kv_heads, num_kv_heads], 1)
    gate = q[:, :0]
    if has_gate:
        q, gate = q.unflatten(1, (num_q_heads, 2)).unbind(2)
    return rotated(q, q_weight), rotated(k, k_weight), v.flatten(1).contiguous(), gate.flatten(1).contiguous()


def install() -> None:
    """Registers the kernels that vllm-ascend calls as operators."""
    global _library
    _library = torch.library.Library("vllm", "FRAGMENT")
    schema = torch.library.infer_schema(split_qkv_rmsnorm_mrope, mutates_args=())
    _library.define(f"triton_split_qkv_rmsnorm_mrope{schema}")
    _library.impl("triton_split_qkv_rmsnorm_mrope", split_qkv_rmsnorm_mrope, "PrivateUse1")


_library: torch.library.Library | None = None
