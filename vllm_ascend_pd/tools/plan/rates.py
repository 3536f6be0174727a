# SPDX-License-Identifier: Apache-2.0
"""Computes how many requests per second prefill and decode engines can serve. docs/plan.md has the formulas."""

from typing import NamedTuple

from vllm_ascend_pd.tools.plan.exchange import PROMPT_TOKENS
from vllm_ascend_pd.tools.plan.figures import PlanFigures, RateFigures, Timing
from vllm_ascend_pd.tools.plan.model import PlanError


class Traffic(NamedTuple):
    """Usual requests, and the user's figures of decode."""

    prompt_tokens: int
    output_tokens: int
    step_ms: float
    requests: int  # that a data-parallel rank decodes at once at most
    kv_gib: float  # of each rank


def make_rates(plan: PlanFigures, timing: Timing, traffic: Traffic) -> RateFigures:
    """Raises PlanError if decode's KV cache cannot hold one such request, or without prefill's compute time."""
    if timing.compute_ms is None:
        raise PlanError("the rates of engines need prefill's compute time")
    # Times of prompts with these tokens, in seconds; timing has those of a prompt of PROMPT_TOKENS.
    seconds = traffic.prompt_tokens / PROMPT_TOKENS / 1000
    compute = timing.compute_ms * seconds
    decoding = traffic.output_tokens * traffic.step_ms / 1000
    # Decode reserves a prompt's blocks before prefill computes it.
    fitting = _fitting_requests(plan, traffic)
    prefill = (plan.prefill.dp / compute, plan.prefill.dp / (timing.prefill_link_ms * seconds))
    decode = (
        plan.decode.dp * traffic.requests / decoding,
        plan.decode.dp * fitting / (compute + decoding),
        plan.prefill.dp / (timing.decode_link_ms * seconds),
    )
    ratio = min(decode) / min(prefill)
    return RateFigures(traffic.prompt_tokens, traffic.output_tokens, *prefill, *decode, prefill_per_decode=ratio)


def _fitting_requests(plan: PlanFigures, traffic: Traffic) -> int:
    """Returns how many whole requests fit into the KV cache of a data-parallel rank, in whole blocks."""
    block = plan.decode.block_size
    tokens = -(-(traffic.prompt_tokens + traffic.output_tokens) // block) * block
    windows = sum(kind.layers * kind.window_bytes for kind in plan.model.layer_kinds)
    fitting = int(traffic.kv_gib * 2**30 // (tokens * max(plan.decode.bytes_per_token) + windows))
    if not fitting:
        raise PlanError(f"decode: a request of {tokens} tokens does not fit into {traffic.kv_gib:g} GiB of KV cache")
    return fitting
