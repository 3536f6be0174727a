# SPDX-License-Identifier: Apache-2.0
"""Operators of gated delta nets (Qwen3.5's linear attention), as vllm-ascend calls them on the emulated NPU.

A head's state is `[value size, key size]` in the cache, and `[key size, value size]` in `chunk_gated_delta_rule_fwd`.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SCHEMAS = {
    "npu_causal_conv1d_custom": (
        "(Tensor(a!) output, Tensor x, Tensor weight, *, Tensor(b!) conv_state, Tensor? bias_opt,"
        " Tensor query_start_loc_opt, Tensor cache_indices_opt, Tensor? initial_state_mode_opt,"
        " Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, int run_mode) -> ()"
    ),
    "npu_fused_gdn_gating": "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    "npu_recurrent_gated_delta_rule": (
        "(Tensor query, Tensor key, Tensor value, *, Tensor g, Tensor beta, Tensor(a!) state, float scale,"
        " Tensor actual_seq_lengths, Tensor ssm_state_indices) -> Tensor"
    ),
}
"""Of vllm-ascend's compiled library, which is not loaded here."""


def install(library: torch.library.Library) -> None:
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, globals()[name], "PrivateUse1")


# --- vllm-ascend's compiled operators ----------------------------------------------------------------------


def npu_causal_conv1d_custom(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor,
    cache_indices_opt: Tensor,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> None:
    """Each token's channels from its own and the `width - 1` tokens before it, which `conv_state` keeps.

    `x`: `[tokens, channels]`; `weight`: `[width, channels]`; `conv_state`: `[blocks, at least width - 1, channels]`.
    """
    assert bias_opt is None, "a bias is not emulated"
    assert num_accepted_tokens_opt is None, "drafts are not emulated"
    starts, kept = query_start_loc_opt.tolist(), weight.shape[0] - 1
    blocks = cache_indices_opt.view(len(starts) - 1, -1)[:, 0].tolist()
    begins = [True] * len(blocks) if initial_state_mode_opt is None else initial_state_mode_opt.bool().tolist()
    for block, has_state, (first, end) in zip(blocks, begins, pairwise(starts), strict=True):
        if first == end:
            continue
        state = conv_state[block, :kept]
        before = state.to(x.dtype) if has_state else torch.zeros_like(state, dtype=x.dtype)
        tokens = torch.cat((before, x[first:end]))
        windows = tokens.float().unfold(0, kept + 1, 1)
        mixed = (windows * weight.t().float()).sum(-1)
        output[first:end] = (functional.silu(mixed) if activation_mode else mixed).to(output.dtype)
        state.copy_(tokens[-kept:])


def npu_fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay, and how much of a token is learned; both `[1, tokens, heads]`."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), torch.sigmoid(b.float()).to(b.dtype).unsqueeze(0)


def npu_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
) -> Tensor:
    """Runs requests' tokens in place over `state`: `[blocks, heads, value size, key size]`.

    `actual_seq_lengths`: 0, and then each request's number of tokens.
    """
    out, first = torch.zeros_like(value), 0
    for tokens, block in zip(actual_seq_lengths.tolist()[1:], ssm_state_indices.tolist(), strict=False):
        at = slice(first, first + tokens)
        answers, last = _delta_rule(
            query[at], key[at], value[at], g[at], beta[at], scale, state[block].transpose(-1, -2)
        )
        out[at] = answers
        state[block] = last.transpose(-1, -2)
        first += tokens
    return out


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a request's answers and its last state.

    `query`, `key`: `[tokens, key heads, key size]`; `value`: `[tokens, heads, value size]`; `g`, `beta`: `[tokens,
    heads]`; `state`: `[heads, key size, value size]`.
    """
    times = value.shape[1] // key.shape[1]
    queries, keys = (each.float().repeat_interleave(times, 1) for each in (query * scale, key))
    values, learns, keeps = value.float(), beta.float()[..., None], g.float().exp()[..., None, None]
    state, answers = state.float(), []
    for token in range(len(values)):
        state = state * keeps[token]
        known = torch.bmm(keys[token].unsqueeze(1), state)
        new = (values[token] - known.squeeze(1)) * learns[token]
        state = torch.baddbmm(state, keys[token].unsqueeze(2), new.unsqueeze(1))
        answers.append(torch.bmm(queries[token].unsqueeze(1), state))
    return torch.cat(answers, 1).transpose(0, 1).to(value.dtype) if answers else value, state


# --- functions of vllm-ascend and vLLM that launch Triton kernels ---------------------------------------------


def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    normalized = x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)
    return normalized.to(output_dtype or x.dtype)


def layer_norm_fwd_npu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[Tensor, None, Tensor]:
    assert is_rms_norm, "mean and bias are not emulated"
    assert bias is None, "mean and bias are not emulated"
    assert norm_before_gate, "a gate before the norm is not emulated"
    assert group_size in (None, x.shape[-1]), "groups are not emulated"
    assert z is not None, "a norm without a gate is not emulated"
    assert out is None, "a given output is not emulated"
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    normalized = x.float() * scale * weight.float()
    return (normalized * functional.silu(z.float())).to(x.dtype), None, scale.squeeze(-1)


def clear_ssm_states(ssm_states: Tensor, has_initial_state: Tensor) -> None:
    keeps = has_initial_state.to(ssm_states.device).to(ssm_states.dtype)
    ssm_states.mul_(keeps.view(-1, *[1] * (ssm_states.dim() - 1)))


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    prebuilt_meta: Any = None,
) -> tuple[Tensor, Tensor, None, Tensor, None, None, None]:
    assert output_final_state, "training is not emulated"
    out, last, starts = torch.zeros_like(v), torch.empty_like(initial_state), cu_seqlens.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        parts = (each[0, first:end] for each in (q, k, v, g, beta))
        out[0, first:end], last[request] = _delta_rule(*parts, scale, initial_state[request])
    return g, out, None, last, None, None, None


def replace(module: ModuleType) -> None:
    """Replaces what `module` defines of these functions."""
    for function in (l2norm_fwd, layer_norm_fwd_npu, clear_ssm_states, chunk_gated_delta_rule_fwd):
        if hasattr(module, function.__name__):
            setattr(module, function.__name__, function)
