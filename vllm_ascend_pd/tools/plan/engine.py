# SPDX-License-Identifier: Apache-2.0
"""The KV caches that an engine's ranks register, as vllm-ascend lays them out: token-major, K and V apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.layout import (
    BlockKind,
    CacheTensor,
    Geometry,
    LayerSpec,
    LayoutError,
    Order,
    Packing,
    RankCaches,
    block_geometry,
)
from vllm_ascend_pd.tools.plan.layers import BLOCK_SIZES, LayerCache, ModelShape, TensorEntry
from vllm_ascend_pd.tools.plan.model import PlanError

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
    for cache in model.kinds:
        try:
            for tensor in cache.tensors:
                topology.replicas(tp, tensor.heads)
        except topology.TopologyError as error:
            heads = "heads of a state" if cache.is_state else "KV heads"
            raise PlanError(f"{side}: {error}".replace("KV heads", heads)) from None
    if engine.pp > len(model.layers):
        raise PlanError(
            f"{side}: pipeline parallel size {engine.pp} leaves stages without any of {len(model.layers)} layers"
        )
    if model.is_compressed and engine.block_size not in BLOCK_SIZES:
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
    """Returns the caches of one rank, with addresses 0. The group of a cache is its index in `model.kinds`.

    The geometries are those of the whole model, in the same order on every rank of both sides.
    """
    geometries: dict[Geometry, int] = {}
    of_kind: dict[LayerCache, list[int]] = {}
    for group, cache in enumerate(model.kinds):
        packings = cache.packings or (Packing.NONE,) * len(cache.tensors)
        of_kind[cache] = [
            geometries.setdefault(_geometry(engine, tp_rank, group, cache, tensor, packing), len(geometries))
            for tensor, packing in zip(cache.tensors, packings, strict=True)
        ]
    tensors = [
        CacheTensor(f"model.layers.{layer}.self_attn.{cache.name}", part, 0, num_blocks, geometry)
        for layer in stage_layers(len(model.layers), engine.pp)[pp_rank]
        for cache in model.layers[layer]
        for part, geometry in enumerate(of_kind[cache])
    ]
    return RankCaches(tuple(geometries), tuple(tensors))


def _geometry(
    engine: PlannedEngine, tp_rank: int, group: int, cache: LayerCache, tensor: TensorEntry, packing: Packing
) -> Geometry:
    heads = len(engine.sharding.heads(tp_rank, tensor.heads))
    if cache.is_state:
        return Geometry(
            group=group,
            order=Order.HEAD_MAJOR,
            dtype=tensor.dtype,
            block_size=1,
            block_stride=heads * tensor.head_bytes,
            heads=heads,
            total_heads=tensor.heads,
            head_bytes=tensor.head_bytes,
            kind=BlockKind.STATE,
        )
    block_size, per_entry = cache.block_tokens(engine.block_size), cache.tokens_per_entry
    spec = LayerSpec(group, block_size, heads, tensor.heads, tokens_per_entry=per_entry)
    shape = (1, block_size // per_entry, heads, tensor.width)
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
