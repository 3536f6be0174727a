# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine sends a decode engine, found out by the connector's own planner: which ranks, how many bytes,
in how many writes. Plans depend on shapes alone, and grow by whole units of tokens, so one of a single unit serves all
requests of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine, default_block_size, rank_caches
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import ModelShape


@dataclass(frozen=True)
class Exchange:
    """Of one unit of tokens, all layers: `unit_bytes` of all ranks together, `rank_bytes` of the busiest prefill rank,
    `descriptors` of that rank at most. `targets`: to how many decode ranks a prefill rank writes. Per lane, what part
    of the bytes passes one NIC of each kind (NICs of a kind carry the same whatever the lane): `p_loads[lane]`,
    `d_loads[lane]` as (kind, part). `writers[lane]`: the prefill ranks that write to decode's first rank; `covers`: the
    indices of its tensors that each of them fills. `d_token_bytes`: of KV on a decode rank."""

    layers: int
    unit: int
    unit_bytes: int
    rank_bytes: int
    descriptors: int
    targets: int
    p_loads: tuple[tuple[tuple[int, float], ...], ...]
    d_loads: tuple[tuple[tuple[int, float], ...], ...]
    writers: tuple[tuple[int, ...], ...]
    covers: tuple[int, ...]
    d_token_bytes: float
    prefill: PlannedEngine
    decode: PlannedEngine
    d_caches: RankCaches
    ranks_per_nic: int

    @property
    def lanes(self) -> int:
        return len(self.p_loads)

    @property
    def p_nics(self) -> int:
        """Kinds."""
        return 1 + max(kind for loads in self.p_loads for kind, _ in loads)

    @property
    def d_nics(self) -> int:
        return 1 + max(kind for loads in self.d_loads for kind, _ in loads)

    def engines_per_nic(self, engine: PlannedEngine) -> int:
        """That share one, as they are smaller than a NIC's ranks."""
        return max(1, self.ranks_per_nic // engine.tp)

    def units(self, start: int, stop: int, last: bool) -> int:
        """That become complete when tokens `[start, stop)` are computed; at the prompt's end the last one too, be it
        filled or not."""
        return (-(-stop // self.unit) if last else stop // self.unit) - start // self.unit


def make_exchange(model: ModelShape, p_tp: int, d_tp: int, ranks_per_nic: int) -> Exchange:
    """Raises PlanError where such engines cannot work together."""
    layout = Layout.VLLM_ASCEND
    size = default_block_size(model, layout)
    prefill, decode = PlannedEngine("prefill", p_tp, 1, 1, size), PlannedEngine("decode", d_tp, 1, 1, size)
    plan = make_plan(model, layout, prefill, decode, step_tokens=8192, staging_slots=4, tokens=size)
    lanes = range(plan.senders[0].lanes)
    flows = [[flow for flow in plan.prompt.flows if flow.lane == lane] for lane in lanes]
    senders = [_totals((flow.source.tp_rank, flow.nbytes) for flow in of_lane) for of_lane in flows]
    readers = [_totals((flow.target.tp_rank, flow.nbytes) for flow in of_lane) for of_lane in flows]
    written = [_totals((flow.source.tp_rank, flow.descriptors) for flow in of_lane) for of_lane in flows]
    caches = rank_caches(model, layout, decode, 0, 0, 1)
    return Exchange(
        layers=plan.model.cached_layers,
        unit=plan.unit_tokens,
        unit_bytes=plan.prompt.nbytes,
        rank_bytes=max(max(of_lane.values()) for of_lane in senders),
        descriptors=max(max(of_lane.values()) for of_lane in written),
        targets=max(sum(flow.source == of_lane[0].source for flow in of_lane) for of_lane in flows),
        p_loads=_loads(senders, p_tp, ranks_per_nic),
        d_loads=_loads(readers, d_tp, ranks_per_nic),
        writers=tuple(plan.readers[0].writers),
        covers=tuple(range(len(caches.tensors))),
        d_token_bytes=plan.decode.bytes_per_token[0],
        prefill=prefill,
        decode=decode,
        d_caches=caches,
        ranks_per_nic=ranks_per_nic,
    )


def _totals(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for rank, number in pairs:
        sums[rank] = sums.get(rank, 0) + number
    return sums


def _loads(by_lane: Sequence[dict[int, int]], ranks: int, per_nic: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Of each lane: (kind of NIC, part of the lane's bytes that passes one of that kind)."""
    nics = range(-(-ranks // per_nic))
    columns = [
        tuple(sum(lane.get(r, 0) for r in range(nic * per_nic, (nic + 1) * per_nic)) for lane in by_lane)
        for nic in nics
    ]
    kinds = list(dict.fromkeys(columns))
    return tuple(
        tuple((kind, column[lane] / sum(totals.values())) for kind, column in enumerate(kinds) if column[lane])
        for lane, totals in enumerate(by_lane)
    )
