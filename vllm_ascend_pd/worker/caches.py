# SPDX-License-Identifier: Apache-2.0
"""Describes the KV cache tensors that vLLM registers, and the memory they lie in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from vllm_ascend_pd.core.layout import CacheTensor, Geometry, LayoutError, RankCaches, block_geometry

KVCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """What the tensors of a layer's cache hold: its cache group, tokens per block, KV heads here and in all."""

    group: int
    block_size: int
    heads: int
    total_heads: int


@dataclass(frozen=True)
class RegisteredCaches:
    """A rank's caches: their description, the tensors by index, and each layer's tensor indices."""

    description: RankCaches
    tensors: tuple[torch.Tensor, ...]
    layers: dict[str, tuple[int, ...]]

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of every tensor; tensors may share memory."""
        return [(tensor.data_ptr(), _extent(tensor)) for tensor in self.tensors]


def describe(
    kv_caches: Mapping[str, KVCache], specs: Mapping[str, LayerSpec], *, heads_first: bool
) -> RegisteredCaches:
    """Describes `kv_caches` (layer name -> tensor or tuple of tensors, `[num_blocks, ...]` each).

    `heads_first`: where a shape leaves it open, heads come before tokens. Raises LayoutError.
    """
    geometries: dict[Geometry, int] = {}
    described: list[CacheTensor] = []
    tensors: list[torch.Tensor] = []
    layers: dict[str, tuple[int, ...]] = {}
    for layer, cache in kv_caches.items():
        if layer not in specs:
            raise LayoutError(f"{layer}: registered without belonging to a cache group")
        spec = specs[layer]
        parts = (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)
        layers[layer] = tuple(range(len(tensors), len(tensors) + len(parts)))
        for part, tensor in enumerate(parts):
            try:
                geometry = block_geometry(
                    tensor.shape,
                    tensor.stride(),
                    tensor.element_size(),
                    group=spec.group,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    block_size=spec.block_size,
                    heads=spec.heads,
                    total_heads=spec.total_heads,
                    heads_first=heads_first,
                )
            except LayoutError as error:
                raise LayoutError(f"{layer}: {error}") from None
            index = geometries.setdefault(geometry, len(geometries))
            described.append(CacheTensor(layer, part, tensor.data_ptr(), tensor.shape[0], index))
            tensors.append(tensor)
    return RegisteredCaches(RankCaches(tuple(geometries), tuple(described)), tuple(tensors), layers)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
