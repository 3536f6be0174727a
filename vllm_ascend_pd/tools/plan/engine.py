# SPDX-License-Identifier: Apache-2.0
"""The KV caches that an engine's ranks register, in the layout of vLLM's CPU backend or of vllm-ascend."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, LayerSpec, RankCaches, block_geometry
from vllm_ascend_pd.tools.plan.model import BLOCK_SIZES, Cached, LayerCache, ModelShape, PlanError, TensorEntry


class Layout(enum.StrEnum):
    """The layout of KV caches.

    VLLM_ASCEND: token-major, with a tensor each for K and V. VLLM_CPU: head-major, with K and V in one tensor.
    """

    VLLM_ASCEND = "vllm-ascend"
    VLLM_CPU = "vllm-cpu"


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


def default_block_size(model: ModelShape, layout: Layout) -> int:
    return 16 if layout is Layout.VLLM_CPU and model.mla else 128


def check_engine(model: ModelShape, layout: Layout, engine: PlannedEngine) -> None:
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
    if model.compressed:
        _check_compressed(layout, engine)
    elif layout is Layout.VLLM_CPU:
        if model.mla and engine.block_size != 16:
            raise PlanError(f"{side}: vLLM's CPU backend has blocks of 16 tokens with MLA, not of {engine.block_size}")
        if not model.mla and engine.block_size % 32:
            raise PlanError(
                f"{side}: vLLM's CPU backend needs blocks of a multiple of 32 tokens, not of {engine.block_size}"
            )
        if len(model.widths) > 2:
            raise PlanError(
                f"{side}: the sparse attention's caches are only described for layout {Layout.VLLM_ASCEND.value}"
            )


def _check_compressed(layout: Layout, engine: PlannedEngine) -> None:
    if layout is not Layout.VLLM_ASCEND:
        raise PlanError(
            f"{engine.side}: compressed caches are only described for layout {Layout.VLLM_ASCEND.value}, not for "
            f"{layout.value}"
        )
    if engine.block_size not in BLOCK_SIZES:
        raise PlanError(
            f"{engine.side}: compressed caches need a block size of {', '.join(map(str, BLOCK_SIZES))}, not of "
            f"{engine.block_size}"
        )


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


def rank_caches(
    model: ModelShape, layout: Layout, engine: PlannedEngine, pp_rank: int, tp_rank: int, num_blocks: int
) -> RankCaches:
    """Returns the caches of one rank, with addresses 0."""
    if model.compressed:
        return _compressed_caches(model, engine, pp_rank, num_blocks)
    heads = len(topology.owned_heads(tp_rank, engine.tp, model.kv_heads))
    kinds = [_kind(model, layout, layer) for layer in range(len(model.cached))]
    geometries: list[Geometry] = []
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    # The caches with most tensors come first: they stand for all in the table of prefill's ranks.
    for group, kind in enumerate(sorted({kind for kind in kinds if kind}, key=lambda kind: (-len(kind[1]), kind))):
        first[kind] = len(geometries)
        geometries += [_geometry(model, layout, engine.block_size, heads, group, width) for width in kind[1]]
    tensors = []
    for layer in stage_layers(len(model.cached), engine.pp)[pp_rank]:
        if (own := kinds[layer]) is not None:
            name = f"model.layers.{layer}.self_attn.attn"
            tensors += [CacheTensor(name, part, 0, num_blocks, first[own] + part) for part in range(len(own[1]))]
    return RankCaches(tuple(geometries), tuple(tensors))


def _kind(model: ModelShape, layout: Layout, layer: int) -> tuple[str, tuple[int, ...]] | None:
    """Returns what the cache of a layer is, and the widths of its tensors. None: it has none."""
    if model.cached[layer] not in (Cached.FULL, Cached.WINDOW):
        return None
    widths = tensor_widths(model, layout)
    return model.cached[layer].name, widths[:-1] if layer in model.without_key else widths


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


def tensor_widths(model: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Returns the elements per head and token in each tensor of a layer."""
    return model.widths if layout is Layout.VLLM_ASCEND else (sum(model.widths),)


def _geometry(model: ModelShape, layout: Layout, block_size: int, heads: int, group: int, width: int) -> Geometry:
    heads_first = layout is Layout.VLLM_CPU
    shape = (1, heads, block_size, width) if heads_first else (1, block_size, heads, width)
    spec, dtype = LayerSpec(group, block_size, heads, model.kv_heads), model.dtype
    strides = _contiguous(shape)
    return block_geometry(shape, strides, dtype.itemsize, dtype.torch_name, spec, heads_first=heads_first)


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides
