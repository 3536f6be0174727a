# SPDX-License-Identifier: Apache-2.0
"""Computes a plan with the connector's own functions, so that it matches what the connector does.

Sizes are in bytes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.ascend import communicator_bytes
from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.layout import BlockKind, Geometry, RankCaches
from vllm_ascend_pd.core.plan import RankMapping, UnitPortion, Units, descriptors, make_mapping, regroupable, slot_bytes
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.tools.plan.engine import (
    DEFAULT_BLOCK_SIZE,
    PlannedEngine,
    check_engine,
    rank_caches,
)
from vllm_ascend_pd.tools.plan.layers import ModelShape
from vllm_ascend_pd.tools.plan.model import PlanError


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
    # Ranks that hold the same heads divide the prompts. These are the writes for prompts of this index.
    lane: int
    exchanging: int = 1  # ranks of the source's all-to-all, including itself; 1 if there is none
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
    units: int  # whole units of tokens that the prompt is transferred as
    flows: tuple[Flow, ...]
    nbytes: int  # of all ranks
    busiest_sender: int  # maximum bytes that one prefill rank sends
    busiest_reader: int  # maximum bytes that one decode rank receives
    room: int  # bytes of KV cache that the prompt takes on a decode rank of the stage with the most
    descriptors: int  # of all ranks, if no two blocks are adjacent
    descriptors_contiguous: int  # of all ranks, if all blocks are adjacent


class PlanFigures(msgspec.Struct, frozen=True):
    """What engines of two shapes send each other."""

    model: ModelShape
    bytes_per_token: float  # of the layers that keep all tokens
    window_bytes: int  # the most of windows and chunks, of all layers, once per prompt
    state_bytes: int  # of all layers, once per prompt
    prefill: PlannedEngine
    decode: PlannedEngine
    unit_tokens: int  # the smaller block size of the two sides
    lanes: int  # prefill ranks with the same heads and decode ranks, which divide the prompts
    regrouping: tuple[str, ...]  # how units become decode's, such as exchanged or quantized
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
    tokens: int = 1000,
) -> PlanFigures:
    """Returns the transfers from one prefill engine to one decode engine, for a prompt of `tokens`.

    Raises PlanError where that cannot work.
    """
    for engine in (prefill, decode):
        check_engine(model, engine)
    p_ranks, d_ranks = (_ranks(model, engine) for engine in (prefill, decode))
    _check_fit(model.name, prefill, decode, p_ranks, d_ranks)
    # Heads are split equally in every stage, so one stage represents all.
    geometries = p_ranks[RankPosition(0, 0)].geometries
    d_blocks = [theirs.block_size for theirs in d_ranks[RankPosition(0, 0)].geometries]
    mappings = [
        [
            make_mapping(ours, rank, prefill.sharding, decode.sharding, d_block)
            for ours, d_block in zip(caches.geometries, d_blocks, strict=True)
        ]
        for (stage, rank), caches in p_ranks.items()
        if stage == 0
    ]
    lanes = math.lcm(*(mapping.replicas for mapping in mappings[0]))
    flows = []
    for lane in range(lanes):
        for source, caches in p_ranks.items():
            for stage in range(decode.pp):
                theirs = RankPosition(stage, 0), d_ranks[RankPosition(stage, 0)]
                flows += _flows(model, (source, caches), mappings[source.tp_rank], theirs, lane, tokens)
    of_tokens = next(i for i, geometry in enumerate(geometries) if geometry.kind is BlockKind.TOKENS)
    unit = mappings[0][of_tokens].unit
    totals = {geometry.total_heads for geometry in regroupable(geometries)}
    groups = {ranks for total in totals for ranks in topology.regroup_groups(prefill.sharding, total)}
    caches_of_all = [cache for caches in model.layers for cache in caches]
    return PlanFigures(
        model=model,
        bytes_per_token=sum(cache.bytes_per_token for cache in caches_of_all),
        window_bytes=sum(cache.bounded_bytes for cache in caches_of_all if not cache.is_state),
        state_bytes=sum(cache.bounded_bytes for cache in caches_of_all if cache.is_state),
        prefill=prefill,
        decode=decode,
        unit_tokens=unit,
        lanes=lanes,
        regrouping=_regrouping(mappings),
        staging=_staging(p_ranks.values(), step_tokens, staging_slots, groups),
        prompt=_prompt(tokens, _sent_tokens(model, tokens), unit, flows, decode_room(model, decode, tokens)),
        notes=(*model.notes, *_notes(model, prefill, decode, unit)),
    )


def decode_room(model: ModelShape, decode: PlannedEngine, tokens: int) -> int:
    """Returns the bytes of KV cache that a request of `tokens` takes on a decode rank of the stage with the most.

    vLLM gives a state a block of its own, which has at least the size of an attention layer's.
    """

    def room(caches: RankCaches) -> int:
        of_block: Counter[tuple[str, int]] = Counter()  # bytes, by layer and cache
        for tensor in caches.tensors:
            geometry = caches.geometry_of(tensor)
            of_block[tensor.layer, geometry.group] += geometry.block_bytes
        kinds = model.kinds
        page = max((size for (_, group), size in of_block.items() if not kinds[group].is_state), default=0)
        return sum(
            max(size, page if kinds[group].is_state else 0) * kinds[group].most_blocks(tokens, decode.block_size)
            for (_, group), size in of_block.items()
        )

    return max(room(rank_caches(model, decode, stage, 0, _NUM_BLOCKS)) for stage in range(decode.pp))


def _sent_tokens(model: ModelShape, tokens: int) -> int:
    return tokens - model.leaves_last_token


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
    ours: tuple[RankPosition, RankCaches],
    mappings: Sequence[RankMapping],
    theirs: tuple[RankPosition, RankCaches],
    lane: int,
    tokens: int,
) -> list[Flow]:
    """Returns what a rank sends of a prompt of `tokens` in `lane` to the ranks of a stage of decode.

    `ours`, `theirs`: a position with its caches. The other ranks of decode's stage have the same.
    """
    (source, caches), (first, others) = ours, theirs
    there = others.by_name()
    flows: dict[int, Flow] = {}
    copies: dict[tuple[int, UnitPortion], tuple[Counter[int], Counter[int]]] = {}
    for tensor in caches.tensors:
        mapping = mappings[tensor.geometry]
        if (tensor.layer, tensor.part) not in there or not mapping.serves(lane):
            continue
        for portion in mapping.portions:
            key = (tensor.geometry, portion)
            if key not in copies:
                geometries = caches.geometries[tensor.geometry], others.geometries[tensor.geometry]
                scattered, contiguous = (
                    _copies(model, mapping, portion, geometries, tokens, gap=gap) for gap in (1, 0)
                )
                copies[key] = (scattered, contiguous)
            scattered, contiguous = copies[key]
            position = RankPosition(first.pp_rank, portion.tp_rank)
            flow = flows.setdefault(portion.tp_rank, Flow(source, position, lane))
            flow.exchanging = max(flow.exchanging, len(mapping.ranks))
            layer = int(tensor.layer.split(".")[2])
            flow.scattered.setdefault(layer, Counter()).update(scattered)
            flow.contiguous.setdefault(layer, Counter()).update(contiguous)
    return [flow for _, flow in sorted(flows.items())]


def _copies(
    model: ModelShape,
    mapping: RankMapping,
    portion: UnitPortion,
    geometries: tuple[Geometry, Geometry],
    tokens: int,
    gap: int,
) -> Counter[int]:
    """Returns how many descriptors of each size one tensor of a layer has for a prompt of `tokens`, with `gap` blocks
    between any two blocks of the prompt.

    `geometries`: prefill's and decode's.
    """
    cache = model.kinds[geometries[0].group]
    if cache.is_state:
        start, stop = 0, 1  # a state counts as one token
    else:
        stop = geometries[0].complete(_sent_tokens(model, tokens))
        seen = cache.seen_from(tokens - 1)
        start = seen - seen % geometries[1].block_size
    units = Units.of(mapping.unit, [(start, stop)])
    src, dst = (
        units.offsets(units.blocks([_blocks(stop, geometry, gap)], [0], geometry.span), geometry)
        for geometry in geometries
    )
    if mapping.is_staged:
        _, own = mapping.share(len(units))
        dst = dst[own]
        src = np.arange(len(dst)) * mapping.staged_bytes  # of any plane
    return Counter(descriptors(portion, src, dst).nbytes.tolist())


def _blocks(tokens: int, geometry: Geometry, gap: int) -> range:
    return range(1, 1 + -(-tokens // geometry.block_size) * (1 + gap), 1 + gap)


def _prompt(tokens: int, sent_tokens: int, unit: int, flows: Sequence[Flow], room: int) -> PromptFigures:
    one = [flow for flow in flows if flow.lane == 0]
    sent: Counter[RankPosition] = Counter()
    received: Counter[RankPosition] = Counter()
    for flow in one:
        sent[flow.source] += flow.nbytes
        received[flow.target] += flow.nbytes
    return PromptFigures(
        tokens=tokens,
        units=-(-sent_tokens // unit),
        flows=tuple(flows),
        nbytes=sent.total(),
        busiest_sender=max(sent.values()),
        busiest_reader=max(received.values()),
        room=room,
        descriptors=sum(flow.descriptors for flow in one),
        descriptors_contiguous=sum(flow.descriptors_contiguous for flow in one),
    )


def _regrouping(mappings: Iterable[Iterable[RankMapping]]) -> tuple[str, ...]:
    staged = [mapping for of_rank in mappings for mapping in of_rank if mapping.is_staged]
    found = {"exchanged" if mapping.ranks else "quantized" if mapping.packs else "dealt out" for mapping in staged}
    return tuple(sorted(found))


def _staging(ranks: Iterable[RankCaches], step_tokens: int, slots: int, groups: Iterable[tuple[int, ...]]) -> Staging:
    size = max(slot_bytes(caches, step_tokens) for caches in ranks)
    if size == 0:
        return Staging(step_tokens, 0, 0, 0, 0, 0)
    joined = max(Counter(rank for group in groups for rank in group).values(), default=0)
    return Staging(step_tokens, slots, size, (slots + _EXCHANGE_BUFFERS) * size, joined, communicator_bytes(joined))


def _notes(model: ModelShape, prefill: PlannedEngine, decode: PlannedEngine, unit: int) -> list[str]:
    notes = []
    for engine in (prefill, decode):
        if engine.block_size != DEFAULT_BLOCK_SIZE and not model.has_states:
            notes.append(
                f"{engine.side}: vllm-ascend makes the block size 128 unless chunked prefill and prefix caching are off"
            )
    if unit < min(prefill.block_size, decode.block_size):
        notes.append(
            f"blocks of {prefill.block_size} and {decode.block_size} tokens: KV is written {unit} tokens at a time, "
            "which is slow; take block sizes of which one is a multiple of the other"
        )
    return notes
