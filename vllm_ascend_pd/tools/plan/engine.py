# SPDX-License-Identifier: Apache-2.0
"""The KV caches that an engine's ranks register, as vllm-ascend lays them out: token-major, K and V apart."""

from collections.abc import Sequence
from dataclasses import dataclass

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
from vllm_ascend_pd.tools.plan.model import BLOCK_SIZES, LayerCache, ModelShape, PlanError, TensorEntry

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
    heads = len(engine.sharding.heads(tp_rank, model.kv_heads))
    geometries: list[Geometry] = []
    first: dict[LayerCache, int] = {}
    for group, cache in enumerate(model.kinds):
        first[cache] = len(geometries)
        for tensor, packing in zip(cache.tensors, _packings(model, cache), strict=True):
            spec = LayerSpec(
                group,
                cache.entries(engine.block_size) * cache.tokens_per_entry,
                heads,
                model.kv_heads,
                tokens_per_entry=cache.tokens_per_entry,
            )
            geometries.append(_geometry(engine, cache, tensor, spec, packing))
    tensors = [
        CacheTensor(f"model.layers.{layer}.self_attn.{cache.name}", part, 0, num_blocks, first[cache] + part)
        for layer in stage_layers(len(model.layers), engine.pp)[pp_rank]
        for cache in model.layers[layer]
        for part in range(len(cache.tensors))
    ]
    return RankCaches(tuple(geometries), tuple(tensors))


def _packings(model: ModelShape, cache: LayerCache) -> tuple[Packing, ...]:
    """Returns how decode keeps each tensor of a cache."""
    if cache.int8:
        return (Packing.INT8_NZ, Packing.NZ if model.mla else Packing.INT8_NZ)
    return (Packing.NONE,) * len(cache.tensors)


def _geometry(
    engine: PlannedEngine, cache: LayerCache, tensor: TensorEntry, spec: LayerSpec, packing: Packing
) -> Geometry:
    shape = (1, cache.entries(engine.block_size), spec.heads, tensor.width)
    kept = block_geometry(shape, _contiguous(shape), tensor.itemsize, tensor.dtype, spec, heads_first=False)
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
