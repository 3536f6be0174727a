# SPDX-License-Identifier: Apache-2.0
"""Computes a plan's times: of a layer's writes, and the requests per second that engines can serve.

docs/plan.md has the formulas with their sources.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_pd.tools.plan.figures import (
    PROMPT_TOKENS,
    Flow,
    PlanFigures,
    RankPosition,
    RateFigures,
    WriteTime,
    size_of,
)
from vllm_ascend_pd.tools.plan.model import PlanError
from vllm_ascend_pd.tools.write_costs import WriteCosts

_SLOWER = 1.5
"""Descriptors limit writes that take so many times as long as their bytes alone."""


def write_times(flows: Iterable[Flow], costs: Sequence[WriteCosts]) -> tuple[WriteTime, ...]:
    """Returns what one layer's writes take by each of `costs`."""
    by_source: dict[RankPosition, list[Flow]] = {}
    for flow in flows:
        if flow.lane == 0:
            by_source.setdefault(flow.source, []).append(flow)
    ranks = list(by_source.values())
    # A rank of r that exchange heads writes 1/r of the units, and gets all but 1/r of their bytes from the others.
    exchanged = max(_layer_bytes(flows) * (1 - 1 / flows[0].exchanging) for flows in ranks)
    return tuple(_write_time(each, ranks, exchanged) for each in costs)


def _write_time(costs: WriteCosts, ranks: Sequence[Sequence[Flow]], exchanged: float) -> WriteTime:
    """`ranks`: the flows of each prefill rank. `exchanged`: bytes that a rank gets by the layer's all-to-all."""
    contiguous = max(_writes_ms(costs, [flow.contiguous for flow in flows]) for flows in ranks)
    scattered, nbytes = max(
        (_writes_ms(costs, [flow.scattered for flow in flows]), _layer_bytes(flows)) for flows in ranks
    )
    exchange = 0.0 if not exchanged else None if costs.exchange is None else exchanged / (costs.exchange * 1e6)
    if exchange is not None and exchange > scattered:
        limit = "all-to-all"
    else:
        limit = "link" if scattered <= _SLOWER * nbytes / (costs.most * 1e6) else "descriptors"
    return WriteTime(costs.chip, costs.link, costs.engine, contiguous, scattered, exchange, limit)


def _writes_ms(costs: WriteCosts, flows: Iterable[Mapping[int, Counter[int]]]) -> float:
    return 1000 * sum(costs.total(_largest(by_layer).elements()) for by_layer in flows)


def _layer_bytes(flows: Iterable[Flow]) -> int:
    return sum(size_of(_largest(flow.scattered)) for flow in flows)


def _largest(by_layer: Mapping[int, Counter[int]]) -> Counter[int]:
    """Returns the descriptors of the layer with the most bytes."""
    return max(by_layer.values(), key=size_of)


class Traffic(NamedTuple):
    """Usual requests, and the user's figures of decode."""

    prompt_tokens: int
    output_tokens: int
    step_ms: float
    requests: int  # that a data-parallel rank decodes at once at most
    kv_gib: float  # of each rank
    link_gbit: float  # bandwidth of each rank in each direction


def make_rates(plan: PlanFigures, compute_ms: float, traffic: Traffic) -> RateFigures:
    """`compute_ms`: as in the plan. Raises PlanError if decode's KV cache cannot hold one such request."""
    # The plan is of a prompt of PROMPT_TOKENS.
    prompts = traffic.prompt_tokens / PROMPT_TOKENS
    compute = compute_ms / 1000 * prompts
    bytes_per_second = traffic.link_gbit * 1e9 / 8
    decoding = traffic.output_tokens * traffic.step_ms / 1000
    # Decode reserves a prompt's blocks before prefill computes it.
    fitting = _fitting_requests(plan, traffic)
    # Prompts are spread over lanes and data-parallel engines.
    sent = plan.prompt.busiest_sender / plan.lanes * prompts
    prefill = (plan.prefill.dp / compute, plan.prefill.dp * bytes_per_second / sent)
    decode = (
        plan.decode.dp * traffic.requests / decoding,
        plan.decode.dp * fitting / (compute + decoding),
        plan.decode.dp * bytes_per_second / (plan.prompt.busiest_reader * prompts),
    )
    ratio = min(decode) / min(prefill)
    return RateFigures(*prefill, *decode, prefill_per_decode=ratio)


def _fitting_requests(plan: PlanFigures, traffic: Traffic) -> int:
    """Returns how many whole requests fit into the KV cache of a data-parallel rank, in whole blocks."""
    block = plan.decode.block_size
    tokens = -(-(traffic.prompt_tokens + traffic.output_tokens) // block) * block
    fitting = int(traffic.kv_gib * 2**30 // (tokens * plan.decode_bytes + plan.window_bytes))
    if not fitting:
        raise PlanError(f"decode: a request of {tokens} tokens does not fit into {traffic.kv_gib:g} GiB of KV cache")
    return fitting
