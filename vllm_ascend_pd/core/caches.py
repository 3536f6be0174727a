# SPDX-License-Identifier: Apache-2.0
"""Describes the KV cache tensors that vLLM registers, and the memory they lie in."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from vllm_ascend_pd.core.layout import (
    ALL_TOKENS,
    CacheTensor,
    Geometry,
    LayoutError,
    RankCaches,
    TokenShare,
    block_geometry,
)
from vllm_ascend_pd.core.regions import Region, merge
from vllm_ascend_pd.core.states import LayerState, state_geometries

_SMALL_GAP = 4096
"""Bytes between two regions of a storage that are registered along with them, as vllm-ascend does: the number of
regions is limited (`core/regions.py`)."""

KVCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """What the tensors of a layer's cache hold: its cache group, tokens per block, KV heads here and in all.
    `encoding` names what is in tensors of plain bytes (uint8), where they are not numbers themselves; `share` says
    which of a request's tokens are here, `draft` whose layer it is, both as in `Geometry`."""

    group: int
    block_size: int
    heads: int
    total_heads: int
    encoding: str | None = None
    share: TokenShare = ALL_TOKENS
    draft: str = ""

    def dtype_of(self, tensor: torch.Tensor) -> str:
        """As both sides compare it: two encodings may take the same bytes."""
        if tensor.dtype is torch.uint8 and self.encoding is not None:
            return self.encoding
        return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StateSpec:
    """What a block of a Mamba or linear attention layer holds: its cache group, and states one after the other."""

    group: int
    states: tuple[LayerState, ...]


class LayerTensors(NamedTuple):
    """Tensors of one layer that have one geometry: their descriptions, and the tensors."""

    described: tuple[CacheTensor, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RegisteredCaches:
    """A rank's caches: their description, the tensors by index, and each layer's tensor indices.

    A tensor that holds several states is described by its runs of bytes, and is there once for each. A layer that
    only reads another's cache has no tensors of its own.
    """

    description: RankCaches
    tensors: tuple[torch.Tensor, ...]
    layers: dict[str, tuple[int, ...]]

    def regions(self) -> list[Region]:
        """The memory of all tensors. Tensors of one storage with small gaps between them are one region; a region never
        reaches from one storage into another, which may be another allocation."""
        by_storage: dict[int, list[Region]] = {}
        for tensor in self.tensors:
            regions = by_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
            regions.append((tensor.data_ptr(), _extent(tensor)))
        return [region for regions in by_storage.values() for region in merge(regions, gap=_SMALL_GAP)]

    @functools.cached_property
    def layers_by_geometry(self) -> dict[str, dict[int, LayerTensors]]:
        """layer -> index of a geometry -> the layer's tensors that lie so."""
        grouped: dict[str, dict[int, LayerTensors]] = {}
        for layer, indices in self.layers.items():
            alike = grouped[layer] = {}
            for index in indices:
                described, tensor = self.description.tensors[index], self.tensors[index]
                known = alike.get(described.geometry, LayerTensors((), ()))
                alike[described.geometry] = LayerTensors((*known.described, described), (*known.tensors, tensor))
        return grouped


def describe(
    kv_caches: Mapping[str, KVCache], specs: Mapping[str, LayerSpec | StateSpec], *, heads_first: bool
) -> RegisteredCaches:
    """Describes `kv_caches` (layer name -> tensor or tuple of tensors, `[num_blocks, ...]` each).

    `heads_first`: where a shape leaves it open, heads come before tokens. Raises LayoutError.
    """
    geometries: dict[Geometry, int] = {}
    described: list[CacheTensor] = []
    tensors: list[torch.Tensor] = []
    layers: dict[str, tuple[int, ...]] = {}
    known: set[tuple[int, int]] = set()
    for layer, cache in kv_caches.items():
        whole = (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)
        if layer not in specs:
            if {tensor.data_ptr() for tensor in whole} <= {tensor.base for tensor in described}:
                layers[layer] = ()  # vLLM tells its ranks alone of layers that read another's cache
                continue
            raise LayoutError(f"{layer}: registered without belonging to a cache group")
        spec = specs[layer]
        first = len(tensors)
        try:
            runs = _states(whole, spec) if isinstance(spec, StateSpec) else _tokens(whole, spec, heads_first)
        except LayoutError as error:
            raise LayoutError(f"{layer}: {error}") from None
        for part, (tensor, offset, geometry) in enumerate(runs):
            index = geometries.setdefault(geometry, len(geometries))
            base = tensor.data_ptr() + offset
            if (base, index) in known:
                continue  # the cache of an earlier layer, which this one shares
            known.add((base, index))
            described.append(CacheTensor(layer, part, base, tensor.shape[0], index))
            tensors.append(tensor)
        layers[layer] = tuple(range(first, len(tensors)))
    return RegisteredCaches(RankCaches(tuple(geometries), tuple(described)), tuple(tensors), layers)


_Run: TypeAlias = tuple[torch.Tensor, int, Geometry]  # the tensor, bytes from its start, how blocks lie from there


def _tokens(cache: Sequence[torch.Tensor], spec: LayerSpec, heads_first: bool) -> list[_Run]:
    tensors = [_by_blocks(tensor, spec.block_size, heads_first) for tensor in cache]
    return [
        (
            tensor,
            0,
            block_geometry(
                tensor.shape,
                tensor.stride(),
                tensor.element_size(),
                group=spec.group,
                dtype=spec.dtype_of(tensor),
                block_size=spec.block_size,
                heads=spec.heads,
                total_heads=spec.total_heads,
                heads_first=heads_first,
                share=spec.share,
                draft=spec.draft,
            ),
        )
        for tensor in tensors
    ]


def _by_blocks(tensor: torch.Tensor, block_size: int, heads_first: bool) -> torch.Tensor:
    """`[num_blocks, block_size, ...]`. Beside states vllm-ascend makes blocks long, and gives its kernels several of
    theirs for each, one after the other."""
    number, tokens = tensor.shape[:2]
    if heads_first or block_size in tensor.shape[1:3] or block_size % tokens or not tensor.is_contiguous():
        return tensor
    if number * tokens % block_size:
        return tensor
    return tensor.view(-1, block_size, *tensor.shape[2:])


def _states(cache: Sequence[torch.Tensor], spec: StateSpec) -> list[_Run]:
    """The states lie one after the other in a block of one tensor, or in a tensor each."""
    whole_block = len(cache) == 1
    if not whole_block and len(cache) != len(spec.states):
        raise LayoutError(f"{len(cache)} tensors for {len(spec.states)} states")
    runs: list[_Run] = []
    offset = 0
    for index, state in enumerate(spec.states):
        tensor = cache[0 if whole_block else index]
        stride = tensor.stride(0) * tensor.element_size()
        block = tensor[0]
        begin = offset if whole_block else 0
        if not block.is_contiguous() or begin + state.nbytes > block.numel() * block.element_size():
            raise LayoutError(f"states of {[s.nbytes for s in spec.states]} bytes in blocks of shape {block.shape}")
        runs += [(tensor, begin + run, geometry) for run, geometry in state_geometries(state, spec.group, stride)]
        offset += state.nbytes
    return runs


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
