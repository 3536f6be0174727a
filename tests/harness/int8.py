# SPDX-License-Identifier: Apache-2.0
"""Ranks of engines whose decode keeps KV in int8, in NZ order, and whose prefill keeps it in bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.kv import Model, Prompt, layer_name, make_caches, truth
from harness.rank_programs import DecodeRank, PrefillRank
from vllm_ascend_pd.core.caches import Quantize
from vllm_ascend_pd.core.layout import LayerSpec, Packing
from vllm_ascend_pd.device.packing import quantize_c8

C8 = (Packing.INT8_NZ, Packing.INT8_NZ)
FAKQUANT = (Packing.INT8_NZ, Packing.NZ)


@dataclass(frozen=True)
class Int8Model(Model):
    """`packings`: how decode keeps each part. `plain`: layers that are not quantized. `salt`: changes all scales."""

    packings: tuple[Packing, ...] = C8
    plain: tuple[int, ...] = (1,)
    salt: int = 0

    def scales(self, layer: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (scale, offset) of all heads: `[heads, width]`, as a checkpoint has them."""
        generator = torch.Generator().manual_seed(self.salt * 997 + layer * 31 + part)
        shape = (1 if self.replicated else self.heads, self.widths[part])
        scale = (torch.rand(shape, generator=generator) * 0.03 + 0.01).to(self.dtype)
        offset = torch.randint(-20, 20, shape, generator=generator).to(self.dtype)
        return scale, offset


def as_quantized(kv: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Quantizes `[tokens, heads, width]`, written down without the product's function."""
    return (kv * (1.0 / scale) + offset).round().clamp(-128, 127).to(torch.int8)


def from_nz(cache: torch.Tensor) -> torch.Tensor:
    """Returns `[num_blocks, tokens, heads, width]` of a cache of this shape that is in NZ order.

    As vllm-ascend's kernels see it: `[num_blocks, heads, width / 32 bytes, tokens, 32 bytes]` (`_nz_5d_view`).
    """
    blocks, tokens, heads, width = cache.shape
    column = 32 // cache.element_size()
    seen = cache.view(blocks, heads, width // column, tokens, column)
    return seen.permute(0, 3, 1, 2, 4).reshape(cache.shape)


class _Int8Rank:
    """What both sides' ranks add to those of the harness."""

    is_packed = False

    def make(self: Any) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict[str, LayerSpec]]:
        caches, specs = super().make()  # type: ignore[misc]
        model = self.model
        packed = caches
        if self.is_packed:
            dtypes = tuple(torch.int8 if each is Packing.INT8_NZ else model.dtype for each in model.packings)
            packed = make_caches(replace(model, dtypes=dtypes), self.side, self.rank, self.pp_rank, self.on)
        for layer in self.quantized_layers():
            caches[layer_name(layer)] = packed[layer_name(layer)]
        return caches, self.quantized(specs)

    def quantized_layers(self: Any) -> list[int]:
        return [layer for layer in self.side.layers_of(self.pp_rank, self.model) if layer not in self.model.plain]

    def quantized(self: Any, specs: dict[str, LayerSpec]) -> dict[str, LayerSpec]:
        """Returns the specs with how decode keeps the quantized layers."""
        specs, model = dict(specs), self.model
        for layer in self.quantized_layers():
            scales = tuple(
                f"{model.salt}/{layer}/{part}" if packing is Packing.INT8_NZ else ""
                for part, packing in enumerate(model.packings)
            )
            name = layer_name(layer)
            specs[name] = replace(specs[name], packings=model.packings, is_packed=self.is_packed, scales=scales)
        return specs


class Int8PrefillRank(_Int8Rank, PrefillRank):
    def quantize(self) -> dict[tuple[str, int], Quantize]:
        own = self._heads()

        def function(layer: int, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
            scale, offset = (each[own.start : own.stop].to(self.on) for each in self.model.scales(layer, part))
            inverse = 1.0 / scale[None]
            return lambda kv: quantize_c8(kv, inverse, offset[None])

        return {
            (layer_name(layer), part): function(layer, part)
            for layer in self.quantized_layers()
            for part, packing in enumerate(self.model.packings)
            if packing is Packing.INT8_NZ
        }


class Int8DecodeRank(_Int8Rank, DecodeRank):
    is_packed = True

    def kept(self, layer: int, part: int, cache: torch.Tensor) -> torch.Tensor:
        return super().kept(layer, part, cache) if layer in self.model.plain else from_nz(cache.cpu())

    def expected(self, layer: int, part: int, prompt: Prompt) -> torch.Tensor:
        values = truth(self.model, prompt.seed, layer, part, prompt.num_tokens)
        if layer in self.model.plain or self.model.packings[part] is Packing.NZ:
            return values
        return as_quantized(values, *self.model.scales(layer, part))
