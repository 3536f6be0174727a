# SPDX-License-Identifier: Apache-2.0
"""Computes a plan's times: of a prompt's transfer, and the requests per second that engines can serve.

docs/plan.md has the formulas with their sources.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_ascend_pd.tools.plan.figures import (
    PROMPT_TOKENS,
    Flow,
    PlanFigures,
    RankPosition,
    RateFigures,
    SenderFigures,
    Timing,
    WriteSize,
    WriteTime,
)
from vllm_ascend_pd.tools.plan.model import PlanError
from vllm_ascend_pd.tools.write_costs import WriteCosts


class Link(NamedTuple):
    """What a rank writes over, and reads over."""

    gbit: float  # of bandwidth in each direction

    def ms(self, nbytes: float) -> float:
        """Returns the time of writes: of their bytes alone, without what each descriptor costs."""
        return nbytes * 8 / (self.gbit * 1e6)


def make_timing(plan: PlanFigures, link_gbit: float, compute_ms: float | None) -> Timing:
    """`link_gbit` is each rank's bandwidth in each direction. `compute_ms` is prefill's time for the plan's prompt."""
    link = Link(link_gbit)
    one = [flow for flow in plan.prompt.flows if flow.lane == 0]
    ends: dict[object, list[Flow]] = {}
    for flow in one:
        ends.setdefault(("out", flow.source), []).append(flow)
        ends.setdefault(("in", flow.target), []).append(flow)
    return Timing(
        link_gbit=link_gbit,
        transfer_ms=link.ms(max(plan.prompt.busiest_sender, plan.prompt.busiest_reader)),
        layer_ms=max(link.ms(_layer_bytes(flows)) for flows in ends.values()),
        prefill_link_ms=link.ms(plan.prompt.busiest_sender / plan.senders[0].lanes),
        decode_link_ms=link.ms(plan.prompt.busiest_reader * plan.prefill.dp / plan.decode.dp),
        compute_ms=compute_ms,
        after_prefill_ms=None
        if compute_ms is None
        else max(_end_ms(flows, plan.model.layers, compute_ms, link) for flows in ends.values()) - compute_ms,
    )


def _layer_bytes(flows: Iterable[Flow]) -> float:
    """Returns the bytes of one layer on a link with these flows. Flows with the same layers are added."""
    by_layers: dict[tuple[int, int], float] = {}
    for flow in flows:
        layers = (flow.first_layer, flow.last_layer)
        by_layers[layers] = by_layers.get(layers, 0.0) + flow.nbytes / flow.layers
    return max(by_layers.values())


def _end_ms(flows: list[Flow], num_layers: int, compute_ms: float, link: Link) -> float:
    """Returns when a link has sent its flows.

    It cannot begin before their first layer is computed, and cannot send the last layer before that is computed.
    """
    layer_ms = compute_ms / num_layers
    first = min(flow.first_layer for flow in flows)
    last = max(flow.last_layer for flow in flows)
    busy = link.ms(sum(flow.nbytes for flow in flows))
    return max((first + 1) * layer_ms + busy, (last + 1) * layer_ms + link.ms(_layer_bytes(flows)))


_SLOWER = 1.5
"""Descriptors limit writes that take so many times as long as their bytes alone."""


def write_times(
    flows: Iterable[Flow], senders: Sequence[SenderFigures], costs: Sequence[WriteCosts]
) -> tuple[WriteTime, ...]:
    """Returns what one layer's writes take by each of `costs`. `senders`: by tp rank."""
    by_source: dict[RankPosition, list[Flow]] = {}
    for flow in flows:
        if flow.lane == 0:
            by_source.setdefault(flow.source, []).append(flow)
    ranks = list(by_source.values())
    # A rank of r that exchange heads writes 1/r of the units, and gets all but 1/r of their bytes from the others.
    exchanged = max(
        _layer_writes_bytes(flows) * (1 - 1 / (len(senders[source.tp_rank].exchanges_with) or 1))
        for source, flows in by_source.items()
    )
    return tuple(_write_time(each, ranks, exchanged) for each in costs)


def _write_time(costs: WriteCosts, ranks: Sequence[Sequence[Flow]], exchanged: float) -> WriteTime:
    """`ranks`: the flows of each prefill rank. `exchanged`: bytes that a rank gets by the layer's all-to-all."""
    contiguous = max(_writes_ms(costs, [flow.layer_writes_contiguous for flow in flows]) for flows in ranks)
    scattered, nbytes = max(
        (_writes_ms(costs, [flow.layer_writes for flow in flows]), _layer_writes_bytes(flows)) for flows in ranks
    )
    exchange = 0.0 if not exchanged else None if costs.exchange is None else exchanged / (costs.exchange * 1e6)
    if exchange is not None and exchange > scattered:
        limit = "all-to-all"
    else:
        limit = "link" if scattered <= _SLOWER * nbytes / (costs.most * 1e6) else "descriptors"
    return WriteTime(costs.chip, costs.link, costs.engine, contiguous, scattered, exchange, limit)


def _writes_ms(costs: WriteCosts, writes: Iterable[Iterable[WriteSize]]) -> float:
    return 1000 * sum(each.number * costs.seconds(each.nbytes) for sizes in writes for each in sizes)


def _layer_writes_bytes(flows: Iterable[Flow]) -> int:
    return sum(each.nbytes * each.number for flow in flows for each in flow.layer_writes)


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
