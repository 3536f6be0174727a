# SPDX-License-Identifier: Apache-2.0
"""Computes the transfer time of a plan's prompt, and how much of it overlaps with prefill's computation."""

from collections.abc import Iterable

from vllm_ascend_pd.tools.plan.figures import Flow, PlanFigures, Timing


def make_timing(plan: PlanFigures, link_gbit: float, compute_ms: float | None) -> Timing:
    """`link_gbit` is each rank's bandwidth in each direction. `compute_ms` is prefill's time for the plan's prompt."""
    ms_per_byte = 8 / (link_gbit * 1e6)
    one = [flow for flow in plan.prompt.flows if flow.lane == 0]
    links: dict[object, list[Flow]] = {}
    for flow in one:
        links.setdefault(("out", flow.source), []).append(flow)
        links.setdefault(("in", flow.target), []).append(flow)
    return Timing(
        link_gbit=link_gbit,
        transfer_ms=max(plan.prompt.busiest_sender, plan.prompt.busiest_reader) * ms_per_byte,
        layer_ms=max(_layer_bytes(flows) for flows in links.values()) * ms_per_byte,
        prefill_link_ms=plan.prompt.busiest_sender / plan.senders[0].lanes * ms_per_byte,
        decode_link_ms=plan.prompt.busiest_reader * plan.prefill.dp / plan.decode.dp * ms_per_byte,
        compute_ms=compute_ms,
        after_prefill_ms=None
        if compute_ms is None
        else max(_end_ms(flows, plan.model.layers, compute_ms, ms_per_byte) for flows in links.values()) - compute_ms,
    )


def _layer_bytes(flows: Iterable[Flow]) -> float:
    """Returns the bytes of one layer on a link with these flows. Flows with the same layers are added."""
    by_layers: dict[tuple[int, int], float] = {}
    for flow in flows:
        layers = (flow.first_layer, flow.last_layer)
        by_layers[layers] = by_layers.get(layers, 0.0) + flow.nbytes / flow.layers
    return max(by_layers.values())


def _end_ms(flows: list[Flow], num_layers: int, compute_ms: float, ms_per_byte: float) -> float:
    """Returns when a link has sent its flows.

    It cannot begin before their first layer is computed, and cannot send the last layer before that is computed.
    """
    layer_ms = compute_ms / num_layers
    first = min(flow.first_layer for flow in flows)
    last = max(flow.last_layer for flow in flows)
    busy = sum(flow.nbytes for flow in flows) * ms_per_byte
    return max((first + 1) * layer_ms + busy, (last + 1) * layer_ms + _layer_bytes(flows) * ms_per_byte)
