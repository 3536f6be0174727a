# SPDX-License-Identifier: Apache-2.0
"""torch_npu's operators on the emulated NPU, as far as they are not aclnn operators of libopapi.

ATen's operators run PyTorch's CPU kernels over the device's (host) memory, queued on the NPU's streams. The fused
operators that vllm-ascend calls for Llama, Gemma and DeepSeek models are written here on ATen. Each replaces the
Python function that vllm-ascend calls, takes the same arguments and asserts what it does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import cann_on_host_gated_delta as gated_delta
import cann_on_host_takes as takes

MEMORY = [
    "empty",
    "empty_strided",
    "empty_like",
    "empty_with_format",
    "unsafe_empty_with_format",
    "empty_with_swapped_memory",
    "new_empty_strided",
    "copy_",
    "_to_copy",
    "_copy_from",
    "_copy_from_and_resize",
    "copy_memory_",
    "contiguous",
    "_lazy_clone",
    "view",
    "as_strided",
    "as_strided_",
    "set_",
    "is_set_to",
    "resize_",
    "resize_as_",
    "storage_resize_",
    "get_storage_size",
    "record_stream",
    "_pin_memory",
    "is_pinned",
    "_local_scalar_dense",
    "_has_compatible_shallow_copy_type",
    "zeros",
    "zeros.names",
]
"""Stay torch_npu's own: they are about memory, and what they launch is emulated."""

ACLNN = [
    "fill_.Scalar",
    "zero_",
    "ones",
    "arange",
    "arange.start",
    "arange.start_step",
    "arange.out",
    "arange.start_out",
    "index_select",
    "index_select.out",
    "gather",
    "gather.out",
    "cat",
    "cat.out",
    "constant_pad_nd",
]
"""Stay torch_npu's own down to the aclnn operator: what a KV connector uses, counted and checked as on hardware."""

ACL_FORMAT_ND = 2
"""Plain order in memory; NZ, the matrix unit's, is 29."""

_library: torch.library.Library | None = None


def install(torch_npu: ModuleType, library: Path) -> None:
    """After `import torch_npu`."""
    global _library
    torch.ops.load_library(str(library))
    torch.ops.cann_on_host.replace_aten_kernels([*MEMORY, *ACLNN])
    for function in FUSED:
        setattr(torch_npu, function.__name__, function)
    torch_npu.atb.npu_paged_cache_load = npu_paged_cache_load
    # vllm-ascend's own compiled library needs CANN's.
    _library = torch.library.Library("_C_ascend", "FRAGMENT")
    _library.define("npu_gemma_rms_norm(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)")
    _library.impl("npu_gemma_rms_norm", lambda x, w, epsilon: npu_rms_norm(x, 1.0 + w, epsilon), "PrivateUse1")
    _library.define(
        "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta, float epsilon)"
        " -> (Tensor, Tensor, Tensor)"
    )
    _library.impl("npu_add_rms_norm_bias", _npu_add_rms_norm_bias, "PrivateUse1")
    _library.define("get_physical_device_id(int device) -> int")
    _library.impl("get_physical_device_id", lambda device: device, "CompositeExplicitAutograd")
    gated_delta.install(_library)
    # The plugin library of ATB's operators needs libatb; those that are used are replaced above.
    import torch_npu.op_plugin.atb._atb_ops as atb

    atb._register_atb_extensions = lambda: None


# --- fused operators ---------------------------------------------------------------------------------------


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    takes.norm_weight("npu_rms_norm", x, gamma)
    y, rstd, _ = torch.ops.cann_on_host.add_rms_norm(x, None, gamma, epsilon)
    return y, rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    takes.types("npu_add_rms_norm", takes.FLOAT, x1=x1)
    takes.same_type("npu_add_rms_norm", x1=x1, x2=x2, gamma=gamma)
    return torch.ops.cann_on_host.add_rms_norm(x1, x2, gamma, epsilon)


def _npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return (y if beta is None else y + beta), rstd, x


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    takes.types("npu_swiglu", takes.FLOAT, x=x)
    return torch.ops.cann_on_host.swiglu(x, dim)


def npu_format_cast(x: Tensor, acl_format: int, *args: Any, **kwargs: Any) -> Tensor:
    if acl_format != ACL_FORMAT_ND:
        raise NotImplementedError(f"format {acl_format} is not emulated (vllm-ascend: set weight_nz_mode to 0)")
    return x


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    takes.types("npu_reshape_and_cache", takes.CACHED, **tensors)
    takes.same_type("npu_reshape_and_cache", **tensors)
    torch.ops.cann_on_host.reshape_and_cache(key, value, key_cache, value_cache, slot_indices)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "PA_NZ",
) -> None:
    assert cache_mode == "Norm", f"cache mode {cache_mode} is not emulated"
    _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool = True
) -> None:
    takes.types("npu_rotary_embedding", takes.HALF, query=query, key=key)
    if cos_sin_cache.dtype != torch.float32 or query.dtype != torch.float16:
        takes.same_type("npu_rotary_embedding", query=query, key=key, cos_sin_cache=cos_sin_cache)
    torch.ops.cann_on_host.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    """vllm-ascend 0.30 rotates by it where it has no Triton. One position per token only."""
    assert not any(mrope_section or ()), "sections of positions are not emulated"
    assert cache_mode == "default", f"cache mode {cache_mode} is not emulated"
    takes.types("npu_mrope", takes.FLOAT, query=query, key=key)
    takes.same_type("npu_mrope", query=query, key=key, cos_sin_cache=cos_sin_cache)
    query, key = query.clone(), key.clone()
    torch.ops.cann_on_host.rotary_embedding(positions, query, key, head_size, cos_sin_cache, rotary_mode == "half")
    return query, key


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] = (),
    actual_seq_lengths_kv: Sequence[int] = (),
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    softmax_lse_flag: bool = False,
    antiquant_mode: int = 0,
    antiquant_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert input_layout == "TND", f"layout {input_layout} is not emulated"
    assert antiquant_scale is None, "a quantised KV cache is not emulated"
    operator, kv_heads = "npu_fused_infer_attention_score", num_key_value_heads or num_heads
    takes.attention(operator, query, key, value, query_rope, key_rope)
    key_size, value_size = (
        x.shape[-1] // (kv_heads if x.dim() == 3 and block_table is not None else 1) for x in (key, value)
    )
    takes.head_sizes(operator, query.shape[-1], key_size, value_size, 0 if query_rope is None else query_rope.shape[-1])
    if query_rope is not None:
        assert key_rope is not None
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    return torch.ops.cann_on_host.attention(
        query.contiguous(),
        key,
        value,
        block_table,
        list(actual_seq_lengths),
        list(actual_seq_lengths_kv),
        num_heads,
        kv_heads,
        scale,
        block_size,
        sparse_mode,
        pre_tokens,
    )


def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor,
    key_rope: Tensor,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    input_layout: str = "BSH",
    atten_mask: Tensor | None = None,
    sparse_mode: int = 0,
    softmax_scale: float = 1.0,
    block_table: Tensor | None = None,
    block_size: int = 0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """As MLA's decode calls it: one token per request; the latent cache `[blocks, 1, block_size, size]` is key and
    value."""
    assert input_layout == "BNSD_NBSD", f"layout {input_layout} is not emulated"
    assert query.shape[2] == 1, "several tokens per request are not emulated"
    assert num_key_value_heads == 1, "several KV heads are not emulated"
    operator = "npu_fused_infer_attention_score_v2"
    takes.attention(operator, query, key, value, query_rope, key_rope)
    takes.head_sizes(operator, query.shape[-1], key.shape[-1], value.shape[-1], query_rope.shape[-1])
    requests, heads = query.shape[:2]
    out, lse = torch.ops.cann_on_host.attention(
        torch.cat((query, query_rope), -1).view(requests, heads, -1),
        torch.cat((key, key_rope), -1).flatten(1, 2),
        value.flatten(1, 2),
        block_table,
        list(range(1, requests + 1)),
        list(actual_seq_kvlen),
        heads,
        1,
        softmax_scale,
        block_size,
        0,
        0,
    )
    return out.transpose(0, 1).unsqueeze(2).contiguous(), lse


def npu_attention_update(lse: Sequence[Tensor], out: Sequence[Tensor], update_type: int) -> tuple[Tensor, None]:
    """Merges partial attentions, weighted by their log-sum-exps."""
    takes.types("npu_attention_update", [torch.float32], **{f"lse {i}": each for i, each in enumerate(lse)})
    weights = torch.softmax(torch.stack(list(lse)), 0).nan_to_num(0)
    return sum(part * weight[:, None] for part, weight in zip(out, weights, strict=True)), None  # type: ignore[return-value]


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    takes.types("npu_interleave_rope", takes.HALF, x=x)
    takes.same_type("npu_interleave_rope", x=x, cos=cos, sin=sin)
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    low, high = halves.chunk(2, -1)
    return halves * cos + torch.cat((-high, low), -1) * sin


def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotates halves of heads, as vision towers do; `r1` and `r2` are cosines and sines."""
    assert rotary_mode == "half", f"rotary mode {rotary_mode} is not emulated"
    takes.types("npu_rotary_mul", takes.FLOAT, x=x)
    takes.same_type("npu_rotary_mul", x=x, r1=r1, r2=r2)
    low, high = x.chunk(2, -1)
    return x * r1 + torch.cat((-high, low), -1) * r2


def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    c_kv_scale: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert cache_mode == "PA", f"cache mode {cache_mode} is not emulated"
    assert c_kv_scale is None, "a quantised KV cache is not emulated"
    takes.types("npu_kv_rmsnorm_rope_cache", takes.HALF, kv=kv, gamma=gamma, cos=cos, sin=sin)
    takes.types("npu_kv_rmsnorm_rope_cache", [torch.int64], index=index)
    latent, rope = kv.split([gamma.numel(), kv.shape[-1] - gamma.numel()], -1)
    latent = npu_rms_norm(latent.contiguous(), gamma, epsilon)[0]
    rope = npu_interleave_rope(rope, cos, sin).contiguous()
    tokens = kv.shape[0]
    torch.ops.cann_on_host.reshape_and_cache(
        rope.view(tokens, 1, -1), latent.view(tokens, 1, -1), k_cache, ckv_cache, index.to(torch.int32)
    )
    return k_cache, ckv_cache, rope, latent


def npu_transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] = (0, 1, 2),
) -> Tensor:
    return torch.bmm(x, weight).permute(*perm_y).contiguous()


def _npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> None:
    takes.types("npu_paged_attention", takes.HALF, query=query, key_cache=key_cache, value_cache=value_cache)
    requests = query.shape[0]
    key, value = (cache.view(*cache.shape[:2], -1) for cache in (key_cache, value_cache))
    result, _ = torch.ops.cann_on_host.attention(
        query.view(requests, num_heads, -1),
        key,
        value,
        block_table,
        list(range(1, requests + 1)),
        context_lens.tolist(),
        num_heads,
        num_kv_heads,
        scale_value,
        key.shape[1],
        3,
        0,
    )
    out.copy_(result.view_as(out))


def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, c: Tensor) -> None:
    c.add_(x.t().float() @ weight.float())


def npu_quantize(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Int8 of `x * scales + zero_points`, as torch_npu's documentation has it without `div_mode`, rounded to even."""
    takes.types("npu_quantize", takes.FLOAT, x=x, scales=scales)
    takes.same_type("npu_quantize", scales=scales, zero_points=zero_points)
    assert (dtype, axis, div_mode) == (torch.qint8, -1, False)
    y = x.float() * scales.float()
    if zero_points is not None:
        y = y + zero_points.float()
    return y.round().clamp(-128, 127).to(torch.int8)


def npu_paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cumsum: bool = False,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Copies requests' tokens out of the paged caches, one after another."""
    tensors = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value}
    takes.types("npu_paged_cache_load", takes.CACHED, **tensors)
    indices = {"block_table": block_table, "context_lens": context_lens, "seq_starts": seq_starts}
    takes.types("npu_paged_cache_load", [torch.int32], **indices)
    starts = seq_starts.tolist() if seq_starts is not None else [0] * len(context_lens)
    begin = 0
    for request, tokens in enumerate(context_lens.tolist()):
        for cache, out in ((key_cache, key), (value_cache, value)):
            blocks = cache.index_select(0, block_table[request].long()).flatten(0, 1)
            out[begin : begin + tokens].copy_(blocks[starts[request] : starts[request] + tokens])
        begin += tokens
    return key, value


def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    assert not is_seq_lens_cumsum, "sums of lengths are not emulated"
    npu_paged_cache_load(key_cache, value_cache, block_tables, seq_lens, seq_starts=seq_offset, key=key, value=value)


FUSED: tuple[Callable[..., Any], ...] = (
    npu_rms_norm,
    npu_add_rms_norm,
    npu_swiglu,
    npu_format_cast,
    _npu_reshape_and_cache,
    npu_scatter_pa_kv_cache,
    npu_gather_pa_kv_cache,
    _npu_rotary_embedding,
    npu_mrope,
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
    npu_attention_update,
    npu_interleave_rope,
    npu_rotary_mul,
    npu_kv_rmsnorm_rope_cache,
    npu_transpose_batchmatmul,
    _npu_paged_attention,
    _npu_matmul_add_fp32,
    npu_quantize,
)
