# SPDX-License-Identifier: Apache-2.0
"""The KV caches that an engine's ranks register, as vllm-ascend lays them out: token-major, K and V apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.layout import (
    CacheTensor,
    Geometry,
    LayerSpec,
    LayoutError,
    Packing,
    RankCaches,
    block_geometry,
)
from vllm_ascend_pd.tools.plan.model import BLOCK_SIZES, Cached, LayerCache, ModelShape, PlanError, TensorEntry

DEFAULT_BLOCK_SIZE = 128


@dataclass(frozen=True)
class PlannedEngine:
    """The engines of one side."""

    side: str  # prefill or decode
    tp: int
    pp: int
    dp: int
    block_size: int  # tokens

    @property
    def sharding(self) -> topology.Sharding:
        return topology.sharding(self.tp)


def check_engine(model: ModelShape, engine: PlannedEngine) -> None:
    """Raises PlanError if vLLM would not start such an engine."""
    side, tp = engine.side, engine.tp
    if model.attention_heads % tp:
        raise PlanError(f"{side}: tensor parallel size {tp} does not divide {model.attention_heads} attention heads")
    try:
        topology.replicas(tp, model.kv_heads)
    except topology.TopologyError as error:
        raise PlanError(f"{side}: {error}") from None
    if engine.pp > len(model.cached):
        raise PlanError(
            f"{side}: pipeline parallel size {engine.pp} leaves stages without any of {len(model.cached)} layers"
        )
    if model.compressed and engine.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise PlanError(f"{side}: compressed caches need a block size of {sizes}, not of {engine.block_size}")


def stage_layers(layers: int, pp: int) -> list[range]:
    """Returns the layers of each pipeline stage, as vLLM splits them.

    Remaining layers go to the stages before the last one, starting from the one next to it.
    """
    each, rest = divmod(layers, pp)
    stages = []
    first = 0
    for stage in range(pp):
        count = each + (1 if pp - 1 - rest <= stage < pp - 1 else 0)
        stages.append(range(first, first + count))
        first += count
    return stages


def rank_caches(model: ModelShape, engine: PlannedEngine, pp_rank: int, tp_rank: int, num_blocks: int) -> RankCaches:
    """Returns the caches of one rank, with addresses 0."""
    if model.compressed:
        return _compressed_caches(model, engine, pp_rank, num_blocks)
    heads = len(topology.owned_heads(tp_rank, engine.tp, model.kv_heads))
    kinds = [_kind(model, layer) for layer in range(len(model.cached))]
    geometries: list[Geometry] = []
    first: dict[_Kind, int] = {}
    # The caches with most tensors come first, and of these the ones in int8: they stand for all in the table of
    # prefill's ranks.
    for group, kind in enumerate(sorted({kind for kind in kinds if kind}, key=lambda k: (-len(k[1]), not k[2], k))):
        first[kind] = len(geometries)
        packings = _packings(model) if kind[2] else (Packing.NONE,) * len(kind[1])
        geometries += [
            _geometry(model, engine, heads, group, width, packing)
            for width, packing in zip(kind[1], packings, strict=True)
        ]
    tensors = []
    for layer in stage_layers(len(model.cached), engine.pp)[pp_rank]:
        if (own := kinds[layer]) is not None:
            name = f"model.layers.{layer}.self_attn.attn"
            tensors += [CacheTensor(name, part, 0, num_blocks, first[own] + part) for part in range(len(own[1]))]
    return RankCaches(tuple(geometries), tuple(tensors))


_Kind: TypeAlias = tuple[str, tuple[int, ...], bool]
"""What the cache of a layer is, the widths of its tensors, and whether decode keeps it in int8."""


def _kind(model: ModelShape, layer: int) -> _Kind | None:
    """Returns the kind of a layer's cache. None: it has none."""
    if model.cached[layer] not in (Cached.FULL, Cached.WINDOW):
        return None
    widths = model.widths[:-1] if layer in model.without_key else model.widths
    return model.cached[layer].name, widths, layer in model.int8_layers


def _packings(model: ModelShape) -> tuple[Packing, ...]:
    return (Packing.INT8_NZ, Packing.NZ if model.mla else Packing.INT8_NZ)


def _compressed_caches(model: ModelShape, engine: PlannedEngine, pp_rank: int, num_blocks: int) -> RankCaches:
    """Returns caches with one group for each kind, in the order of `model.kinds`."""
    kinds = model.kinds
    first: dict[LayerCache, int] = {}
    geometries: list[Geometry] = []
    for group, kind in enumerate(kinds):
        first[kind] = len(geometries)
        geometries += [_entries(kind, tensor, group, engine.block_size) for tensor in kind.tensors]
    tensors = [
        CacheTensor(f"model.layers.{layer}.self_attn.{cache.name}", part, 0, num_blocks, first[cache] + part)
        for layer in stage_layers(len(model.cached), engine.pp)[pp_rank]
        for cache in model.compressed[layer]
        for part in range(len(cache.tensors))
    ]
    return RankCaches(tuple(geometries), tuple(tensors))


def _entries(kind: LayerCache, tensor: TensorEntry, group: int, block_size: int) -> Geometry:
    entries = kind.entries(block_size)
    shape = (1, entries, 1, tensor.width)
    spec = LayerSpec(group, entries * kind.tokens_per_entry, 1, 1, tokens_per_entry=kind.tokens_per_entry)
    return block_geometry(shape, _contiguous(shape), tensor.itemsize, tensor.dtype, spec, heads_first=False)


def _geometry(
    model: ModelShape, engine: PlannedEngine, heads: int, group: int, width: int, packing: Packing
) -> Geometry:
    shape = (1, engine.block_size, heads, width)
    spec, dtype = LayerSpec(group, engine.block_size, heads, model.kv_heads), model.dtype
    kept = block_geometry(shape, _contiguous(shape), dtype.itemsize, dtype.torch_name, spec, heads_first=False)
    try:
        packed = msgspec.structs.replace(kept, packing=packing)
    except LayoutError as error:
        raise PlanError(f"{engine.side}: {error}") from None
    return packed.sent if engine.side == "decode" else packed


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides
