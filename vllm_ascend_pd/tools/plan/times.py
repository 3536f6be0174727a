# SPDX-License-Identifier: Apache-2.0
"""Computes a plan's times: of a layer's writes, and the requests per second that engines can serve.

docs/plan.md has the formulas with their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.tools.doctor.report import DoctorReport
from vllm_ascend_pd.tools.plan.exchange import PlanFigures, RankPosition, decode_room, size_of
from vllm_ascend_pd.tools.plan.model import PlanError
from vllm_ascend_pd.tools.write_costs import WriteCosts

_DESCRIPTORS = "descriptors."
"""Of the doctor's findings about descriptors. The way and the size follow."""
_EXCHANGE = "all_to_all_bytes_per_second"
"""The figure of `hardware.collectives`."""


def read_measured(path: Path) -> tuple[WriteCosts, ...]:
    """Returns what `doctor --hardware --json` has measured, for each way. Raises PlanError, and OSError."""
    try:
        findings = msgspec.json.decode(path.read_bytes(), type=DoctorReport).findings
        ways: dict[str, dict[int, float]] = {}
        exchange: float | None = None
        for each in findings:
            if _EXCHANGE in each.figures:
                exchange = float(each.figures[_EXCHANGE]) / 1e9
            if each.check.startswith(_DESCRIPTORS):
                size, seconds = int(each.figures["bytes"]), float(each.figures["seconds"])
                if size <= 0 or seconds <= 0:
                    raise ValueError(f"{each.check} has no positive bytes and seconds")
                ways.setdefault(each.check.removeprefix(_DESCRIPTORS).rpartition(".")[0], {})[size] = seconds
    except (*UNREADABLE, KeyError, ValueError) as error:
        raise PlanError(f"{path} is no report of doctor --hardware --json: {error}") from None
    if not ways:
        raise PlanError(f"{path} has no measured descriptors: doctor needs --hardware")
    return tuple(_measured(way, times, exchange) for way, times in ways.items())


def _measured(way: str, times: dict[int, float], exchange: float | None) -> WriteCosts:
    """`times`: what a descriptor of so many bytes takes, in seconds."""
    sizes = tuple(sorted(times))
    rates = tuple(size / times[size] / 1e9 for size in sizes)
    return WriteCosts("measured", way, "", rates, max(rates), exchange or None, sizes)


_SLOWER = 1.5
"""Descriptors limit writes that take so many times as long as their bytes alone."""


class WriteTime(NamedTuple):
    """What the writes of one layer of the prompt take the prefill rank whose writes take longest."""

    costs: WriteCosts
    contiguous_ms: float  # if all blocks of the prompt are adjacent
    scattered_ms: float  # if no two blocks are adjacent
    # What the layer's all-to-all takes at the highest rate within a machine. 0: there is none. None: unknown rate.
    exchange_ms: float | None
    # "all-to-all" if it takes longer than scattered writes, else what those take: "descriptors" or "link".
    limited_by: str


def write_times(plan: PlanFigures, costs: Iterable[WriteCosts]) -> list[WriteTime]:
    """Returns what one layer's writes take by each of `costs`. States are left out: they are sent once, at the end."""
    states = {layer for layer, caches in enumerate(plan.model.layers) if any(cache.is_state for cache in caches)}
    by_source: dict[RankPosition, list[_LayerWrites]] = {}
    for flow in plan.prompt.flows:
        layers = flow.scattered.keys() - states
        if flow.lane == 0 and layers:
            largest = max(sorted(layers), key=lambda layer: size_of(flow.scattered[layer]))
            writes = _LayerWrites(flow.scattered[largest], flow.contiguous[largest], flow.exchanging)
            by_source.setdefault(flow.source, []).append(writes)
    ranks = list(by_source.values())
    # A rank of r that exchange heads writes 1/r of the units, and gets all but 1/r of their bytes from the others.
    exchanged = max(_bytes(writes) * (1 - 1 / writes[0].exchanging) for writes in ranks)
    return [_write_time(each, ranks, exchanged) for each in costs]


class _LayerWrites(NamedTuple):
    """A prefill rank's writes to one decode rank of the layer with the most bytes, as in `Flow`."""

    scattered: Counter[int]
    contiguous: Counter[int]
    exchanging: int


def _write_time(costs: WriteCosts, ranks: Sequence[Sequence[_LayerWrites]], exchanged: float) -> WriteTime:
    """`ranks`: the writes of each prefill rank. `exchanged`: bytes that a rank gets by the layer's all-to-all."""
    contiguous = max(_ms(costs, [each.contiguous for each in writes]) for writes in ranks)
    scattered, nbytes = max((_ms(costs, [each.scattered for each in writes]), _bytes(writes)) for writes in ranks)
    exchange = 0.0 if not exchanged else None if costs.exchange is None else exchanged / (costs.exchange * 1e6)
    if exchange is not None and exchange > scattered:
        limit = "all-to-all"
    else:
        limit = "link" if scattered <= _SLOWER * nbytes / (costs.most * 1e6) else "descriptors"
    return WriteTime(costs, contiguous, scattered, exchange, limit)


def _ms(costs: WriteCosts, writes: Iterable[Counter[int]]) -> float:
    return 1000 * sum(costs.total(descriptors.elements()) for descriptors in writes)


def _bytes(writes: Iterable[_LayerWrites]) -> int:
    return sum(size_of(each.scattered) for each in writes)


class Traffic(NamedTuple):
    """The answers to the plan's prompt, and the user's figures of decode."""

    output_tokens: int
    step_ms: float
    requests: int  # that a data-parallel rank decodes at once at most
    kv_gib: float  # of each rank
    link_gbit: float  # bandwidth of each rank in each direction
    prefill_first_tokens: int | None = None  # longer prompts are computed before decode has blocks. None: none is


class Rates(NamedTuple):
    """Requests per second. An engine here has all its data-parallel ranks."""

    prefill: dict[str, float]  # that each part of one prefill engine can serve at most
    decode: dict[str, float]  # the same of one decode engine

    @property
    def prefill_per_decode(self) -> float:
        """Prefill engines that keep one decode engine busy."""
        return min(self.decode.values()) / min(self.prefill.values())


def make_rates(plan: PlanFigures, compute_ms: float, traffic: Traffic) -> Rates:
    """`compute_ms`: what prefill computes the plan's prompt in. Raises PlanError if decode's KV cache cannot hold one
    such request."""
    compute = compute_ms / 1000
    bytes_per_second = traffic.link_gbit * 1e9 / 8
    decoding = traffic.output_tokens * traffic.step_ms / 1000
    # Decode reserves a prompt's blocks before prefill computes it, or a long prompt's when it is computed.
    first = traffic.prefill_first_tokens
    computed_first = first is not None and plan.prompt.tokens > first
    waiting = plan.prompt.busiest_reader / bytes_per_second if computed_first else compute
    fitting = _fitting_requests(plan, traffic)
    # Prompts are spread over lanes and data-parallel engines.
    sent: Counter[RankPosition] = Counter()
    for flow in plan.prompt.flows:
        sent[flow.source] += flow.nbytes
    per_prompt = max(sent.values()) / plan.lanes
    return Rates(
        {"computing": plan.prefill.dp / compute, "link": plan.prefill.dp * bytes_per_second / per_prompt},
        {
            "steps": plan.decode.dp * traffic.requests / decoding,
            "KV cache": plan.decode.dp * fitting / (waiting + decoding),
            "link": plan.decode.dp * bytes_per_second / plan.prompt.busiest_reader,
        },
    )


def _fitting_requests(plan: PlanFigures, traffic: Traffic) -> int:
    """Returns how many whole requests fit into the KV cache of a data-parallel rank, in whole blocks."""
    tokens = plan.prompt.tokens + traffic.output_tokens
    fitting = int(traffic.kv_gib * 2**30 // decode_room(plan.model, plan.decode, tokens))
    if not fitting:
        raise PlanError(f"decode: a request of {tokens} tokens does not fit into {traffic.kv_gib:g} GiB of KV cache")
    return fitting
