# SPDX-License-Identifier: Apache-2.0
"""Computes a plan with the connector's own functions, so that it matches what the connector does.

Sizes are in bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.ascend import communicator_bytes
from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.layout import Geometry, Order, RankCaches
from vllm_ascend_pd.core.plan import Route, Target, Units, descriptors, make_route, slot_bytes
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.tools.plan.engine import (
    DEFAULT_BLOCK_SIZE,
    PlannedEngine,
    check_engine,
    rank_caches,
)
from vllm_ascend_pd.tools.plan.model import ModelShape, PlanError

PROMPT_TOKENS = 1000
"""Length of the prompt that the figures are for, in tokens."""


class RankPosition(NamedTuple):
    """The position of a rank within its engine."""

    pp_rank: int
    tp_rank: int


class Staging(msgspec.Struct, frozen=True):
    """Memory that each prefill rank reserves for regrouping. All figures are 0 if no request can need it."""

    step_tokens: int  # tokens of a step, a layer of which fits into a slot
    slots: int
    slot_bytes: int
    total_bytes: int  # of all slots, and of two buffers of a slot's size for the all-to-all
    groups: int  # all-to-all groups that a rank belongs to
    communicator_bytes: int  # that HCCL takes for these groups on an NPU; not in `total_bytes`


@dataclass
class Flow:
    """The writes of one prefill rank to one decode rank for a prompt."""

    source: RankPosition
    target: RankPosition
    lane: int  # index among the prefill ranks with the same heads and decode ranks. It serves prompts of this index
    exchanging: int  # ranks of the source's all-to-all, including itself; 1 if there is none
    # Descriptors by layer, each a count by size in bytes: with no two blocks of the prompt adjacent, and with all.
    scattered: dict[int, Counter[int]] = field(default_factory=dict)
    contiguous: dict[int, Counter[int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(map(size_of, self.scattered.values()))

    @property
    def descriptors(self) -> int:
        return sum(each.total() for each in self.scattered.values())

    @property
    def descriptors_contiguous(self) -> int:
        return sum(each.total() for each in self.contiguous.values())


def size_of(descriptors: Mapping[int, int]) -> int:
    """Returns the bytes of descriptors that are counted by size."""
    return sum(size * count for size, count in descriptors.items())


class PromptFigures(msgspec.Struct, frozen=True):
    """The transfer of one prompt."""

    tokens: int
    units: int  # whole units that the prompt is transferred as
    flows: tuple[Flow, ...]
    nbytes: int  # of all ranks
    busiest_sender: int  # maximum bytes that one prefill rank sends
    busiest_reader: int  # maximum bytes that one decode rank receives
    descriptors: int  # of all ranks, if no two blocks are adjacent
    descriptors_contiguous: int  # of all ranks, if all blocks are adjacent


class PlanFigures(msgspec.Struct, frozen=True):
    """What engines of two shapes send each other."""

    model: ModelShape
    bytes_per_token: float  # windows of compressed caches are not counted
    window_bytes: int  # of the compressed caches of all layers, once per prompt
    bytes_per_token_and_layer: float  # the most of any layer
    prefill: PlannedEngine
    decode: PlannedEngine
    decode_bytes: float  # per token, on a decode rank of the stage with the most
    unit_tokens: int  # the smaller block size of the two sides
    lanes: int  # prefill ranks with the same heads and decode ranks, which serve prompts in turn
    regrouping: tuple[str, ...]  # exchanged, dealt out, quantized: how units become decode's
    staging: Staging
    prompt: PromptFigures
    notes: tuple[str, ...]  # what the figures leave out


_NUM_BLOCKS = 1 << 20  # of every cache: more than any figure needs
_EXCHANGE_BUFFERS = 2  # of a slot's size, see `prefill.regroup.Regrouper`


def make_plan(
    model: ModelShape,
    prefill: PlannedEngine,
    decode: PlannedEngine,
    *,
    step_tokens: int,
    staging_slots: int,
    tokens: int = PROMPT_TOKENS,
) -> PlanFigures:
    """Returns the transfers from one prefill engine to one decode engine, for a prompt of `tokens`.

    Raises PlanError where that cannot work.
    """
    for engine in (prefill, decode):
        check_engine(model, engine)
    p_ranks, d_ranks = (_ranks(model, engine) for engine in (prefill, decode))
    _check_fit(model.name, prefill, decode, p_ranks, d_ranks)
    # Heads are split equally in every stage, so one stage represents all. Both sides have the same list of geometries.
    d_blocks = [theirs.block_size for theirs in d_ranks[RankPosition(0, 0)].geometries]
    routes = [
        [
            make_route(ours, rank, prefill.sharding, decode.sharding, d_block)
            for ours, d_block in zip(caches.geometries, d_blocks, strict=True)
        ]
        for (stage, rank), caches in p_ranks.items()
        if stage == 0
    ]
    flows = []
    for source, caches in p_ranks.items():
        for stage in range(decode.pp):
            theirs = d_ranks[RankPosition(stage, 0)]
            flows += _flows(model, source, caches, routes[source.tp_rank], stage, theirs, tokens)
    unit = routes[0][0].unit
    exchange = any(geometry.sent.order is Order.TOKEN_MAJOR for geometry in p_ranks[RankPosition(0, 0)].geometries)
    groups = topology.regroup_groups(prefill.sharding, model.kv_heads) if exchange else []
    per_token, per_layer = _bytes_per_token(model)
    return PlanFigures(
        model=model,
        bytes_per_token=per_token,
        bytes_per_token_and_layer=per_layer,
        window_bytes=sum(cache.window_bytes for caches in model.layers for cache in caches),
        prefill=prefill,
        decode=decode,
        decode_bytes=max(_stage_bytes(model, d_ranks[RankPosition(stage, 0)]) for stage in range(decode.pp)),
        unit_tokens=unit,
        lanes=routes[0][0].replicas,
        regrouping=_regrouping(routes),
        staging=_staging(p_ranks.values(), step_tokens, staging_slots, groups),
        prompt=_prompt(tokens, unit, flows),
        notes=(*model.notes, *_notes(prefill, decode, routes)),
    )


def _ranks(model: ModelShape, engine: PlannedEngine) -> dict[RankPosition, RankCaches]:
    return {
        RankPosition(pp_rank, tp_rank): rank_caches(model, engine, pp_rank, tp_rank, _NUM_BLOCKS)
        for pp_rank in range(engine.pp)
        for tp_rank in range(engine.tp)
    }


def _check_fit(
    name: str,
    prefill: PlannedEngine,
    decode: PlannedEngine,
    p_ranks: Mapping[RankPosition, RankCaches],
    d_ranks: Mapping[RankPosition, RankCaches],
) -> None:
    """Checks what every prefill rank checks at first contact."""
    described = tuple(RankDescription(*rank, "", "", caches) for rank, caches in d_ranks.items())
    description = EngineDescription("decode", name, decode.tp, decode.pp, described)
    for rank, caches in p_ranks.items():
        rank_info = topology.RankInfo("prefill", name, "", rank.tp_rank, prefill.sharding, rank.pp_rank, prefill.pp, ())
        if (reason := mismatch(caches, rank_info, description)) is not None:
            raise PlanError(reason)


def _flows(
    model: ModelShape,
    source: RankPosition,
    caches: RankCaches,
    routes: Sequence[Route],
    d_stage: int,
    theirs: RankCaches,
    tokens: int,
) -> list[Flow]:
    """Returns what `source` sends to the ranks of decode's stage `d_stage`, whose caches look like `theirs`."""
    there = theirs.by_name()
    flows: dict[int, Flow] = {}
    copies: dict[tuple[int, Target], tuple[Counter[int], Counter[int]]] = {}
    for tensor in caches.tensors:
        index = there.get((tensor.layer, tensor.part))
        if index is None:
            continue
        route = routes[tensor.geometry]
        for target in route.targets:
            key = (tensor.geometry, target)
            if key not in copies:
                ours, others = caches.geometries[tensor.geometry], theirs.geometry_of(theirs.tensors[index])
                sent_tokens = (_first_sent(tokens, _window(model, ours), others.block_size), ours.complete(tokens))
                scattered, contiguous = (_copies(route, target, ours, others, sent_tokens, gap=gap) for gap in (1, 0))
                copies[key] = (scattered, contiguous)
            scattered, contiguous = copies[key]
            flow = flows.setdefault(
                target.tp_rank,
                Flow(source, RankPosition(d_stage, target.tp_rank), routes[0].replica_index, len(routes[0].ranks) or 1),
            )
            layer = int(tensor.layer.split(".")[2])
            flow.scattered.setdefault(layer, Counter()).update(scattered)
            flow.contiguous.setdefault(layer, Counter()).update(contiguous)
    return [flow for _, flow in sorted(flows.items())]


def _window(model: ModelShape, geometry: Geometry) -> int:
    """Returns how many of a prompt's last tokens are sent; 0 for all. Only windows beside compressed caches count."""
    return model.kinds[geometry.group].window


def _first_sent(tokens: int, window: int, block_size: int) -> int:
    """Returns the first token of the prompt that is sent: the first of the block in which a window begins."""
    seen = max(0, tokens - window) if window else 0
    return seen - seen % block_size


def _copies(
    route: Route, target: Target, source: Geometry, theirs: Geometry, tokens: tuple[int, int], gap: int
) -> Counter[int]:
    """Returns how many descriptors of each size one tensor of a layer has, with `gap` blocks between any two blocks of
    the prompt.

    `tokens`: the first that is sent, and the one after the last.
    """
    units = Units.of(route.unit, [tokens])
    src, dst = (
        units.offsets(units.blocks([_blocks(tokens[1], geometry, gap)], [0], geometry.span), geometry)
        for geometry in (source, theirs)
    )
    if route.is_staged:
        _, own = route.share(len(units))
        dst = dst[own]
        src = np.arange(len(dst)) * route.staged_bytes  # of any plane
    return Counter(descriptors(target, src, dst).nbytes.tolist())


def _blocks(tokens: int, geometry: Geometry, gap: int) -> range:
    return range(1, 1 + -(-tokens // geometry.block_size) * (1 + gap), 1 + gap)


def _prompt(tokens: int, unit: int, flows: Sequence[Flow]) -> PromptFigures:
    one = [flow for flow in flows if flow.lane == 0]
    sent: dict[RankPosition, int] = {}
    received: dict[RankPosition, int] = {}
    for flow in one:
        sent[flow.source] = sent.get(flow.source, 0) + flow.nbytes
        received[flow.target] = received.get(flow.target, 0) + flow.nbytes
    return PromptFigures(
        tokens=tokens,
        units=-(-tokens // unit),
        flows=tuple(flows),
        nbytes=sum(sent.values()),
        busiest_sender=max(sent.values()),
        busiest_reader=max(received.values()),
        descriptors=sum(flow.descriptors for flow in one),
        descriptors_contiguous=sum(flow.descriptors_contiguous for flow in one),
    )


def _regrouping(routes: Iterable[Iterable[Route]]) -> tuple[str, ...]:
    staged = [route for of_rank in routes for route in of_rank if route.is_staged]
    found = {"exchanged" if route.ranks else "quantized" if route.packs else "dealt out" for route in staged}
    return tuple(sorted(found))


def _staging(ranks: Iterable[RankCaches], step_tokens: int, slots: int, groups: Sequence[tuple[int, ...]]) -> Staging:
    size = max(slot_bytes(caches, step_tokens) for caches in ranks)
    if size == 0:
        return Staging(step_tokens, 0, 0, 0, 0, 0)
    joined = max(Counter(rank for group in groups for rank in group).values(), default=0)
    return Staging(step_tokens, slots, size, (slots + _EXCHANGE_BUFFERS) * size, joined, communicator_bytes(joined))


def _notes(prefill: PlannedEngine, decode: PlannedEngine, routes: Sequence[Sequence[Route]]) -> list[str]:
    notes = []
    for engine in (prefill, decode):
        if engine.block_size != DEFAULT_BLOCK_SIZE:
            notes.append(
                f"{engine.side}: vllm-ascend makes the block size 128 unless chunked prefill and prefix caching are off"
            )
    unit = routes[0][0].unit
    if unit < min(prefill.block_size, decode.block_size):
        notes.append(
            f"blocks of {prefill.block_size} and {decode.block_size} tokens: KV is written {unit} tokens at a time, "
            "which is slow; take block sizes of which one is a multiple of the other"
        )
    return notes


def _bytes_per_token(model: ModelShape) -> tuple[float, float]:
    """Returns the bytes of a token in all layers, and the most in any of them."""
    per_layer = [model.kv_heads * sum(cache.bytes_per_token for cache in caches) for caches in model.layers]
    return sum(per_layer), max(per_layer)


def _stage_bytes(model: ModelShape, caches: RankCaches) -> float:
    """Returns the bytes of a token on a rank of a stage."""
    geometries = map(caches.geometry_of, caches.tensors)
    return sum(each.entry_bytes / each.tokens_per_entry for each in geometries if not _window(model, each))
