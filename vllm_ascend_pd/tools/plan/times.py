# SPDX-License-Identifier: Apache-2.0
"""Computes a plan's times: of a layer's writes, and the requests per second that engines can serve.

docs/plan.md has the formulas with their sources. What a write to another NPU costs, by the size of its descriptors, is
data here: HIXL's `benchmarks/performance_en.md` (fetched 2026-11-27), 128 MiB in all, from device to remote device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.tools.doctor.report import DoctorReport
from vllm_ascend_pd.tools.plan.exchange import PROMPT_TOKENS, Flow, PlanFigures, RankPosition, size_of
from vllm_ascend_pd.tools.plan.model import PlanError

KIB = 1024
HIXL_SIZES = tuple((16 << n) * KIB for n in range(8))


@dataclass(frozen=True)
class WriteCosts:
    """The figures of one chip, link and engine."""

    # "A2" or "A3"; "measured".
    chip: str
    # What connects the NPUs.
    link: str
    # HIXL's engine: "comm", which Mooncake 0.3.11 uses, or "cs", which 0.3.13 uses with CANN 9.1 and driver 25.5.
    engine: str
    # Bytes in a second, in units of 10**9, by descriptors of the first of `sizes`.
    rates: tuple[float, ...]
    # The highest rate of this link with any engine, for longer descriptors than were measured.
    most: float
    # The highest rate within one machine of this chip, at which ranks exchange heads. None: unknown.
    exchange: float | None
    # Bytes of the measured descriptors, ascending.
    sizes: tuple[int, ...] = HIXL_SIZES

    def __str__(self) -> str:
        return f"{self.chip}, {self.link}, {self.engine}"

    def seconds(self, num_bytes: int) -> float:
        """Returns what one descriptor takes. Between two measured sizes time grows evenly.

        A shorter descriptor than was measured takes as long as the shortest that was. A longer one than was measured
        takes as long as the longest, until the link is full.
        """
        sizes = self.sizes[: len(self.rates)]
        times = [size / rate / 1e9 for size, rate in zip(sizes, self.rates, strict=True)]
        at_full_link = num_bytes / self.most / 1e9 if num_bytes > sizes[-1] else 0.0
        return max(float(np.interp(num_bytes, sizes, times)), at_full_link)

    def total(self, sizes: Iterable[int]) -> float:
        """Returns what descriptors of these sizes take one after the other, in seconds."""
        return sum(map(self.seconds, sizes))


_A3, _A2 = 165, 23.7
HIXL = (
    WriteCosts("A3", "HCCS, two machines", "comm", (3.5, 6.9, 13.0, 22.9, 37.5, 54.6, 71.7, 90.0), 165, _A3),
    WriteCosts("A3", "HCCS, one machine", "cs", (18.0, 36.7, 70.1, 122, 156, 161, 161, 165), 165, _A3),
    WriteCosts("A3", "RoCE, two machines", "comm", (7.8, 6.3, 10.8, 17.9, 22.2, 22.8, 22.9, 23.0), 23.9, _A3),
    WriteCosts("A3", "RoCE, two machines", "cs", (18.4, 23.2, 23.7, 23.8, 23.8, 23.8, 23.8, 23.9), 23.9, _A3),
    WriteCosts("A2", "RoCE, one machine", "comm", (0.72, 1.42, 2.84, 5.74), 23.7, _A2),
    WriteCosts("A2", "RoCE, one machine", "cs", (18.3, 22.7, 23.4, 23.5, 23.6, 23.6, 23.6, 23.7), 23.7, _A2),
)


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
    """Returns what one layer's writes take by each of `costs`."""
    by_source: dict[RankPosition, list[Flow]] = {}
    for flow in plan.prompt.flows:
        if flow.lane == 0:
            by_source.setdefault(flow.source, []).append(flow)
    ranks = list(by_source.values())
    # A rank of r that exchange heads writes 1/r of the units, and gets all but 1/r of their bytes from the others.
    exchanged = max(_layer_bytes(flows) * (1 - 1 / flows[0].exchanging) for flows in ranks)
    return [_write_time(each, ranks, exchanged) for each in costs]


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
    return WriteTime(costs, contiguous, scattered, exchange, limit)


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
    # The plan is of a prompt of PROMPT_TOKENS.
    prompts = traffic.prompt_tokens / PROMPT_TOKENS
    compute = compute_ms / 1000 * prompts
    bytes_per_second = traffic.link_gbit * 1e9 / 8
    decoding = traffic.output_tokens * traffic.step_ms / 1000
    # Decode reserves a prompt's blocks before prefill computes it.
    fitting = _fitting_requests(plan, traffic)
    # Prompts are spread over lanes and data-parallel engines.
    sent = plan.prompt.busiest_sender / plan.lanes * prompts
    return Rates(
        {"computing": plan.prefill.dp / compute, "link": plan.prefill.dp * bytes_per_second / sent},
        {
            "steps": plan.decode.dp * traffic.requests / decoding,
            "KV cache": plan.decode.dp * fitting / (compute + decoding),
            "link": plan.decode.dp * bytes_per_second / (plan.prompt.busiest_reader * prompts),
        },
    )


def _fitting_requests(plan: PlanFigures, traffic: Traffic) -> int:
    """Returns how many whole requests fit into the KV cache of a data-parallel rank, in whole blocks."""
    block = plan.decode.block_size
    tokens = -(-(traffic.prompt_tokens + traffic.output_tokens) // block) * block
    fitting = int(traffic.kv_gib * 2**30 // (tokens * plan.decode_bytes + plan.window_bytes))
    if not fitting:
        raise PlanError(f"decode: a request of {tokens} tokens does not fit into {traffic.kv_gib:g} GiB of KV cache")
    return fitting
