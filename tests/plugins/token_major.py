# SPDX-License-Identifier: Apache-2.0
"""A CPU attention backend whose paged KV cache is token-major, as vllm-ascend's is.

vLLM's own CPU kernel reads head-major blocks only. There the heads of a rank are one contiguous range, so a
transfer between different tensor-parallel sizes never has to regroup them. With this backend it does, in
real vLLM and without an NPU. Plain torch: right, not fast.

Memory of one layer: `[num_blocks, block_size, num_kv_heads, 2 * head_size]`, K and V of a token packed. vLLM
passes it in its logical order `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, as a permuted view.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout


class TokenMajorBackend(CPUAttentionBackend):
    """Decoder self-attention without windows, sinks, ALiBi, soft capping or quantized caches."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @staticmethod
    def get_impl_cls() -> type["TokenMajorImpl"]:
        return TokenMajorImpl


class TokenMajorImpl(CPUAttentionBackendImpl):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "attention type": self.attn_type != "decoder",
            "ALiBi": self.alibi_slopes is not None,
            "sliding window": self.sliding_window != -1,
            "soft capping": self.logits_soft_cap != 0,
            "sinks": self.sinks is not None,
            "fp8 cache": self.is_fp8_kv_cache,
        }
        if any(unsupported.values()):
            names = ", ".join(name for name, used in unsupported.items() if used)
            raise NotImplementedError(f"the token-major test backend does not support: {names}")

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write `key` and `value`, `[num_tokens, num_kv_heads, head_size]`, into their slots."""
        slots = _by_token(kv_cache).flatten(0, 1)
        slots[slot_mapping] = torch.cat([key, value], dim=-1)[: slot_mapping.numel()]

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each request's new tokens to its whole cached sequence, causally."""
        if attn_metadata is None:  # vLLM's warm-up
            return output
        blocks = _by_token(kv_cache)
        starts = attn_metadata.query_start_loc.tolist()
        for i, seq_len in enumerate(attn_metadata.seq_lens.tolist()):
            tokens = slice(starts[i], starts[i + 1])
            num_blocks = -(-seq_len // blocks.shape[1])
            cached = blocks[attn_metadata.block_table[i, :num_blocks].long()].flatten(0, 1)[:seq_len]
            keys, values = cached.transpose(0, 1).chunk(2, dim=-1)
            new = query[tokens].view(-1, self.num_heads, self.head_size).transpose(0, 1)
            causal = torch.ones(new.shape[1], seq_len, dtype=torch.bool).tril(seq_len - new.shape[1])
            attended = scaled_dot_product_attention(
                new[None], keys[None], values[None], causal, scale=self.scale, enable_gqa=True
            )[0]
            output[tokens].view(-1, self.num_heads, self.head_size).copy_(attended.transpose(0, 1))
        return output


def _by_token(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's logical view as it lies in memory: `[num_blocks, block_size, num_kv_heads, 2 * head_size]`."""
    blocks = kv_cache.transpose(1, 2)
    if not blocks.is_contiguous():
        raise ValueError(f"the KV cache is not token-major: strides {kv_cache.stride()}")
    return blocks
