# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan on plain byte arrays: all ranks of a prefill and a decode engine, step by step.

What ends up in decode's caches is compared with the cache of a single engine that holds every head, token and layer.
That truth, and which rank holds which heads and tokens, is worked out here without the code under test.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Order, RankCaches, TokenShare
from vllm_ascend_pd.core.plan import (
    Descriptors,
    Offsets,
    RankMapping,
    Units,
    descriptors,
    make_mapping,
)
from vllm_ascend_pd.core.topology import Sharding

Bytes = np.ndarray  # uint8
Name = tuple[str, int]  # (layer, part)

MAX_HEADS = 8
MAX_TP = 8


def sizes(heads: int) -> list[int]:
    """The tensor-parallel sizes that `heads` KV heads allow."""
    return [tp for tp in range(1, MAX_TP + 1) if tp % heads == 0 or heads % tp == 0]


def partition_states(tp: int, dcp: int = 1, pcp: int = 1) -> tuple[int, ...]:
    """Shares as vLLM 0.23 deals them out: `pcp_rank * dcp + dcp_rank`, with neighbouring ranks in a group of `dcp`."""
    return tuple(pcp_rank * dcp + tp_rank % dcp for pcp_rank in range(pcp) for tp_rank in range(tp))


def all_sizes() -> Iterator[tuple[int, int, int]]:
    """(heads, prefill TP, decode TP), every one that can be."""
    for heads in range(1, MAX_HEADS + 1):
        for p_tp in sizes(heads):
            for d_tp in sizes(heads):
                yield heads, p_tp, d_tp


@dataclass(frozen=True)
class Model:
    """`part_bytes`: bytes of one head of one token, per cache tensor of a layer (K and V apart, or packed)."""

    heads: int
    part_bytes: tuple[int, ...] = (3,)
    order: Order = Order.TOKEN_MAJOR


@dataclass(frozen=True)
class Engine:
    """`stages`: the layers of each pipeline stage. `gap`: bytes between the end of a block and the next. With context
    parallelism `shares` says which share of the tokens each rank of a stage holds, `interleave` tokens at a time."""

    tp: int
    block_size: int
    num_blocks: int
    stages: tuple[tuple[int, ...], ...] = ((0,),)
    gap: int = 0
    shares: tuple[int, ...] = ()
    interleave: int = 1

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.tp, self.shares or (0,) * self.tp, self.interleave)

    @property
    def parts(self) -> int:
        return max(self.shares, default=0) + 1

    @property
    def span(self) -> int:
        """Tokens that a block id stands for."""
        return self.block_size * self.parts

    @property
    def run(self) -> int:
        """Tokens that follow each other in a block."""
        return self.block_size if self.parts == 1 else self.interleave

    def slots(self, rank: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(token, block number of the request, place in the block) of those of tokens `[start, stop)` that `rank`
        holds, as vLLM's `compute_slot_mapping` has it."""
        if self.parts == 1:
            return [(token, *divmod(token, self.block_size)) for token in range(start, stop)]
        held = []
        for token in range(start, stop):
            block, offset = divmod(token, self.span)
            if offset // self.interleave % self.parts == self.shares[rank]:
                turn = offset // (self.interleave * self.parts)
                held.append((token, block, turn * self.interleave + offset % self.interleave))
        return held


@dataclass(frozen=True)
class Request:
    """`cached`: tokens decode already has. `steps`: tokens prefill has computed after each step but the last."""

    num_tokens: int
    p_blocks: tuple[int, ...]
    d_blocks: tuple[int, ...]
    cached: int = 0
    replica_hash: int = 0
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    model: Model
    prefill: Engine
    decode: Engine
    requests: tuple[Request, ...]
    seed: int = 0

    @property
    def unit(self) -> int:
        """Tokens: what travels, and is complete or not, as a whole."""
        return math.gcd(self.prefill.run, self.decode.run)


@dataclass(frozen=True)
class Result:
    """`copies`: how many descriptors each push of one tensor to one decode rank came to. `writers`: the prefill ranks
    whose mappings lead to a decode rank, for a request (its index) that had something to send."""

    copies: tuple[int, ...]
    writers: dict[tuple[int, int], set[int]]


@dataclass
class Tensor:
    """`where[block, token, head, byte]` is that byte's place in `memory`; `writes` counts writes per byte."""

    geometry: Geometry
    memory: Bytes
    where: np.ndarray
    writes: np.ndarray

    def places(self, blocks: tuple[int, ...], slots: list[tuple[int, int, int]]) -> np.ndarray:
        """`[tokens, heads, bytes]` for tokens in these `Engine.slots` of a request with these blocks."""
        return self.where[[blocks[block] for _, block, _ in slots], [place for _, _, place in slots]]


@dataclass
class Rank:
    rank: int
    heads: slice
    tensors: dict[Name, Tensor]
    caches: RankCaches


def heads_of(tp_rank: int, tp: int, total: int) -> slice:
    """As vLLM shards KV heads: dealt out evenly, or each held by neighbouring ranks."""
    if tp <= total:
        return slice(tp_rank * total // tp, (tp_rank + 1) * total // tp)
    head = tp_rank * total // tp
    return slice(head, head + 1)


def make_rank(model: Model, engine: Engine, pp_rank: int, rank: int, rng: np.random.Generator) -> Rank:
    """A rank whose caches hold noise."""
    heads = heads_of(rank % engine.tp, engine.tp, model.heads)
    share = TokenShare(engine.parts, engine.shares[rank], engine.interleave) if engine.parts > 1 else TokenShare()
    count = heads.stop - heads.start
    geometries = tuple(
        Geometry(
            group=0,
            order=model.order,
            dtype="uint8",
            block_size=engine.block_size,
            block_stride=engine.block_size * count * head_bytes + engine.gap,
            heads=count,
            total_heads=model.heads,
            head_bytes=head_bytes,
            share=share,
        )
        for head_bytes in model.part_bytes
    )
    tensors = {}
    for layer in engine.stages[pp_rank]:
        for part, geometry in enumerate(geometries):
            inner = geometry.head_bytes
            if model.order is Order.TOKEN_MAJOR:
                token, head = count * inner, inner
            else:
                token, head = inner, engine.block_size * inner
            block, slot, own, byte = np.ix_(
                np.arange(engine.num_blocks), np.arange(engine.block_size), np.arange(count), np.arange(inner)
            )
            where = block * geometry.block_stride + slot * token + own * head + byte
            size = int(where.max()) + 1
            memory = rng.integers(0, 256, size, dtype=np.uint8)
            tensors[f"layers.{layer}", part] = Tensor(geometry, memory, where, np.zeros(size, dtype=np.int64))
    described = tuple(CacheTensor(layer, part, 0, engine.num_blocks, part) for layer, part in tensors)
    return Rank(rank, heads, tensors, RankCaches(geometries, described))


def make_ranks(model: Model, engine: Engine, rng: np.random.Generator) -> list[list[Rank]]:
    """Per pipeline stage, its ranks."""
    return [
        [make_rank(model, engine, pp_rank, rank, rng) for rank in range(len(engine.shares) or engine.tp)]
        for pp_rank in range(len(engine.stages))
    ]


def simulate(case: Case) -> Result:
    """Runs `case` to its end; asserts that decode's caches are right and that no copy was wasted."""
    rng = np.random.default_rng(case.seed)
    prefill, decode = (make_ranks(case.model, engine, rng) for engine in (case.prefill, case.decode))
    # What a single engine would hold in prefill's blocks: [blocks, tokens, all heads, bytes].
    truth = {
        name: rng.integers(
            0,
            256,
            (case.prefill.num_blocks, case.prefill.span, case.model.heads, case.model.part_bytes[name[1]]),
            dtype=np.uint8,
        )
        for stage in prefill
        for name in stage[0].tensors
    }
    before = [[{n: t.memory.copy() for n, t in rank.tensors.items()} for rank in stage] for stage in decode]
    copies: list[int] = []
    writers: dict[tuple[int, int], set[int]] = {}
    sent = [request.cached for request in case.requests]
    for step in range(1 + max((len(request.steps) for request in case.requests), default=0)):
        ranges = []
        for i, request in enumerate(case.requests):
            computed = request.steps[step] if step < len(request.steps) else request.num_tokens
            _compute(case, prefill, truth, request, computed)
            complete = computed if computed == request.num_tokens else computed // case.unit * case.unit
            ranges.append((sent[i], max(sent[i], complete)))
            sent[i] = ranges[i][1]
        for stage in prefill:
            for name in stage[0].tensors:
                _push(case, stage, decode, name, ranges, rng, copies, writers)
    for stage, stage_before in zip(decode, before, strict=True):
        for rank, rank_before in zip(stage, stage_before, strict=True):
            for name, tensor in rank.tensors.items():
                _check(case, rank, tensor, rank_before[name], truth[name])
    return Result(tuple(copies), writers)


def _compute(case: Case, prefill: list[list[Rank]], truth: dict[Name, Bytes], request: Request, computed: int) -> None:
    for stage in prefill:
        for rank in stage:
            for name, tensor in rank.tensors.items():
                kv = truth[name][list(request.p_blocks)].reshape(-1, *truth[name].shape[2:])
                slots = case.prefill.slots(rank.rank, 0, computed)
                tensor.memory[tensor.places(request.p_blocks, slots)] = kv[tokens_of(slots), rank.heads]


def _push(
    case: Case,
    stage: list[Rank],
    decode: list[list[Rank]],
    name: Name,
    ranges: list[tuple[int, int]],
    rng: np.random.Generator,
    copies: list[int],
    writers: dict[tuple[int, int], set[int]],
) -> None:
    """One tensor's push on all ranks of a stage at once, because some exchange heads."""
    mappings: list[RankMapping] = []
    served: list[list[int]] = []
    wanted: list[Units] = []
    units: list[Offsets] = []
    for rank in stage:
        at = rank.caches.by_name()[name]
        geometry = rank.caches.geometry_of(rank.caches.tensors[at])
        mapping = make_mapping(geometry, rank.rank, case.prefill.sharding, case.decode.sharding, case.decode.block_size)
        mine = [
            i
            for i, (start, stop) in enumerate(ranges)
            if start < stop and mapping.serves(case.requests[i].replica_hash)
        ]
        mappings.append(mapping)
        served.append(mine)
        # A unit has one place on this rank if this rank holds it, else none.
        every = Units.of(mapping.unit, [ranges[i] for i in mine])
        held = every.cut(every.held(geometry.share))
        wanted.append(held)
        units.append(_offsets(held, [case.requests[i].p_blocks for i in mine], geometry, [ranges[i] for i in mine]))
    sends = [
        gather(rank.tensors[name].memory, unit, mapping)
        for rank, unit, mapping in zip(stage, units, mappings, strict=True)
    ]
    d_stage = next(stage for stage in decode if name in stage[0].tensors)
    for rank, mapping, mine, held, unit in zip(stage, mappings, served, wanted, units, strict=True):
        memory, capacity = rank.tensors[name].memory, 0
        if mapping.is_staged:
            assert not mapping.ranks or mapping.ranks[mapping.index] == rank.rank
            group = mapping.ranks or (rank.rank,)
            most, own = mapping.share(len(unit))
            planes = regroup([sends[r][mapping.index] for r in group], mapping)  # the all-to-all
            capacity = most + 1  # staging may be larger than what it holds
            memory = stage_planes(planes, mapping, capacity, rng)
            held, unit = held.cut(own), np.arange(len(unit[own]), dtype=np.int64) * mapping.staged_bytes
        for target in mapping.portions:
            peer = d_stage[target.tp_rank]
            tensor = peer.tensors[name]
            dst = _offsets(held, [case.requests[i].d_blocks for i in mine], tensor.geometry, [ranges[i] for i in mine])
            theirs = held.held(tensor.geometry.share)
            src = unit + target.plane * capacity * mapping.staged_bytes
            todo = descriptors(target, src[theirs], dst[theirs])
            assert_nothing_left_to_merge(todo)
            assert len(todo.src) <= theirs.sum(), "a unit is at most one copy"
            assert todo.nbytes.sum() == theirs.sum() * target.nbytes
            execute(todo, memory, tensor)
            copies.append(len(todo.src))
            for i in mine:
                writers.setdefault((i, target.tp_rank), set()).add(rank.rank)


def tokens_of(slots: list[tuple[int, int, int]]) -> list[int]:
    return [token for token, _, _ in slots]


def _offsets(units: Units, blocks: list[tuple[int, ...]], geometry: Geometry, ranges: list[tuple[int, int]]) -> Offsets:
    """With only the blocks that the ranges need, as a step's metadata brings them."""
    first = [start // geometry.span for start, _ in ranges]
    last = [-(-stop // geometry.span) for _, stop in ranges]
    ids = [np.array(of[a:b], dtype=np.int64) for of, a, b in zip(blocks, first, last, strict=True)]
    return units.offsets(units.blocks(ids, first, geometry.span), geometry)


def gather(memory: Bytes, units: Offsets, mapping: RankMapping) -> list[Bytes]:
    """What goes to each rank of the all-to-all: our heads of its share of the units, and noise up to the largest."""
    if not mapping.is_staged:
        return []
    whole = [memory[at : at + mapping.source_bytes] for at in units]
    sections = []
    for index in range(mapping.ratio):
        most, share = dataclasses.replace(mapping, index=index).share(len(units))
        noise = np.full((most - len(whole[share])) * mapping.source_bytes, 7, dtype=np.uint8)
        sections.append(np.concatenate([*whole[share], noise]).astype(np.uint8))
    return sections


def regroup(received: list[Bytes], mapping: RankMapping) -> list[Bytes]:
    """`[ranks][entries, row]` -> `[planes][entries, row of a plane]`."""
    rows = np.stack([part.reshape(-1, mapping.source_row) for part in received], axis=1)
    planes = rows.reshape(-1, mapping.planes, mapping.plane_row)
    return [planes[:, plane].ravel() for plane in range(mapping.planes)]


def stage_planes(planes: list[Bytes], mapping: RankMapping, capacity: int, rng: np.random.Generator) -> Bytes:
    staging = rng.integers(0, 256, len(planes) * capacity * mapping.staged_bytes, dtype=np.uint8)
    for k, plane in enumerate(planes):
        staging[k * capacity * mapping.staged_bytes :][: plane.size] = plane
    return staging


def execute(todo: Descriptors, memory: Bytes, destination: Tensor) -> None:
    for src, dst, nbytes in zip(todo.src.tolist(), todo.dst.tolist(), todo.nbytes.tolist(), strict=True):
        assert 0 <= src <= src + nbytes <= len(memory)
        assert 0 <= dst <= dst + nbytes <= len(destination.memory)
        destination.memory[dst : dst + nbytes] = memory[src : src + nbytes]
        destination.writes[dst : dst + nbytes] += 1


def assert_nothing_left_to_merge(todo: Descriptors) -> None:
    begins = set(zip(todo.src.tolist(), todo.dst.tolist(), strict=True))
    ends = set(zip((todo.src + todo.nbytes).tolist(), (todo.dst + todo.nbytes).tolist(), strict=True))
    assert not begins & ends


def _check(case: Case, rank: Rank, tensor: Tensor, before: Bytes, truth: Bytes) -> None:
    """Written bytes hold the truth, were written once, and no other byte was touched."""
    expected, writes = before.copy(), np.zeros_like(tensor.writes)
    for request in case.requests:
        kv = truth[list(request.p_blocks)].reshape(-1, *truth.shape[2:])[:, rank.heads]
        slots = case.decode.slots(rank.rank, request.cached, request.num_tokens)
        prompt = tensor.places(request.d_blocks, slots)
        expected[prompt] = kv[tokens_of(slots)]
        writes[prompt] += 1
        # A last, partly filled unit travels whole; what follows the prompt in it does not matter.
        covered = -(-request.num_tokens // case.unit) * case.unit
        rest = tensor.places(request.d_blocks, case.decode.slots(rank.rank, request.num_tokens, covered))
        expected[rest] = tensor.memory[rest]
        writes[rest] += 1
    np.testing.assert_array_equal(tensor.memory, expected)
    np.testing.assert_array_equal(tensor.writes, writes)
