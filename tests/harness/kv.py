# SPDX-License-Identifier: Apache-2.0
"""KV caches without a model: a table of their kinds, their shapes, and the right value of every byte in them."""

from dataclasses import dataclass, replace

import torch

from harness.states import GATED_DELTA, ONE_GROUP, States
from vllm_ascend_pd.core.layout import Order, Packing
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.device.base import aligned_buffer
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES


@dataclass(frozen=True)
class Model:
    """A kind of caches.

    widths: elements per head and token of each part: (head size, head size) for K and V, (512, 64) for MLA's latent and
    rope parts, (2 * head size,) where K and V are packed.
    dtypes: those of the parts, where they differ.
    packings: how decode keeps each part, where not as prefill does. Prefill quantizes what decode keeps in int8.
    plain: layers that both sides keep alike nevertheless.
    salt: changes all scales.
    states: those of a layer that has a state per request, in a cache group of its own.
    """

    layers: int = 3
    heads: int = 4
    widths: tuple[int, ...] = (32, 32)
    dtype: torch.dtype = torch.bfloat16
    order: Order = Order.TOKEN_MAJOR
    replicated: bool = False  # MLA: every rank holds everything
    dtypes: tuple[torch.dtype, ...] = ()
    copied_from: int | None = None  # the first part that each rank of decode context parallelism has all tokens of
    whole_from: int | None = None  # the first part of one head that all ranks have, beside others: a cache of its own
    drafts: int = 0  # how many of the layers, the last ones, are those of a draft
    packings: tuple[Packing, ...] = ()
    plain: tuple[int, ...] = (1,)
    salt: int = 0
    states: States | None = None

    @property
    def draft_layers(self) -> range:
        return range(self.layers - self.drafts, self.layers)

    def dtype_of(self, part: int) -> torch.dtype:
        return self.dtypes[part] if self.dtypes else self.dtype

    def is_whole(self, part: int) -> bool:
        return self.replicated or (self.whole_from is not None and part >= self.whole_from)

    def heads_of(self, rank: int, tp: int, part: int = 0) -> range:
        return range(1) if self.is_whole(part) else sharding(tp).heads(rank, self.heads)

    def is_packed(self, layer: int) -> bool:
        return bool(self.packings) and layer not in self.plain

    def packing(self, layer: int, part: int) -> Packing:
        return self.packings[part] if self.is_packed(layer) else Packing.NONE

    def scales(self, layer: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (scale, offset) of all heads in int8: `[heads, width]`, as a checkpoint has them."""
        generator = torch.Generator().manual_seed(self.salt * 997 + layer * 31 + part)
        shape = (1 if self.replicated else self.heads, self.widths[part])
        scale = (torch.rand(shape, generator=generator) * 0.03 + 0.01).to(self.dtype)
        offset = torch.randint(-20, 20, shape, generator=generator).to(self.dtype)
        return scale, offset


GQA = Model()
TWO_HEADS = Model(heads=2)
SIX_HEADS = Model(heads=6)
HEAD_MAJOR = Model(order=Order.HEAD_MAJOR, widths=(64,))
INT8 = Model(dtype=torch.int8)
FLOAT32 = Model(dtype=torch.float32)
MLA = Model(widths=(128, 16), replicated=True)
SPARSE_C8 = Model(
    widths=(128, 16, 32, 1),
    dtypes=(torch.bfloat16, torch.bfloat16, torch.int8, torch.float16),
    replicated=True,
    copied_from=2,
)
"""As vllm-ascend's sparse attention keeps it: latent, rope, the indexer's keys in 8 bits, and a scale for each."""
INDEXED_HEADS = Model(widths=(32, 32, 16), whole_from=2)
"""MiniMax-M3: K and V of each rank's heads, and keys of an index that all ranks have."""
C8 = Model(packings=(Packing.INT8_NZ, Packing.INT8_NZ))
"""Decode keeps K and V in int8, prefill in bfloat16."""
FAKQUANT = replace(MLA, packings=(Packing.INT8_NZ, Packing.NZ))
"""Decode keeps MLA's latent in int8, and its rope in another order than prefill."""
LINEAR = Model(layers=2, heads=2, states=GATED_DELTA)
MAMBA = Model(layers=2, heads=2, states=ONE_GROUP)


@dataclass(frozen=True)
class Side:
    """One engine's shape. `stages`: how many layers each pipeline stage has; empty for one stage. `dcp`, `pcp`: sizes
    of decode and prefill context parallelism, which deal out tokens `interleave` at a time. `step_tokens`: the most
    that a step of prefill computes, by which the staging is sized."""

    tp: int
    num_blocks: int = 64
    block_size: int = 16
    stages: tuple[int, ...] = ()
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    step_tokens: int = 128
    buffers: int = 0

    def layers_of(self, pp_rank: int, model: Model) -> range:
        stages = self.stages or (model.layers,)
        first = sum(stages[:pp_rank])
        return range(first, first + stages[pp_rank])

    @property
    def pp(self) -> int:
        return max(1, len(self.stages))

    @property
    def ranks(self) -> int:
        """Of a stage. Tensor-parallel rank `t` and prefill-context-parallel rank `p` make rank `p * tp + t`."""
        return self.pcp * self.tp

    @property
    def span(self) -> int:
        """Tokens that a block id stands for."""
        return self.block_size * self.pcp * self.dcp

    def of_part(self, model: Model, part: int) -> "Side":
        """The shape that one part has: without context parallelism and with longer blocks, if ranks have copies."""
        copied = model.copied_from is not None and part >= model.copied_from and self.pcp == 1
        return replace(self, dcp=1, block_size=self.span) if copied else self

    def places(self, rank: int, start: int, stop: int) -> dict[int, list[tuple[int, int]]]:
        """Where `rank` keeps those of tokens `[start, stop)` that it holds: number of the request's block ->
        (token, place in the block), as vLLM's block table works out slots."""
        parts = self.pcp * self.dcp
        part = rank // self.tp * self.dcp + rank % self.tp % self.dcp
        found: dict[int, list[tuple[int, int]]] = {}
        for token in range(start, stop):
            block, offset = divmod(token, self.span)
            turn, within = divmod(offset, self.interleave * parts)
            if within // self.interleave == part:
                place = turn * self.interleave + within % self.interleave
                found.setdefault(block, []).append((token, place))
        return found


@dataclass(frozen=True)
class Prompt:
    """A request: its seed makes its KV."""

    request_id: str
    seed: int
    num_tokens: int
    p_blocks: list[int]
    d_blocks: list[int]
    cached: int = 0
    states: tuple[int, int] | None = None  # prefill's and decode's block of its state, in a cache group of its own


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def truth(model: Model, seed: int, layer: int, part: int, num_tokens: int) -> torch.Tensor:
    """Returns the right KV of one request: `[num_tokens, heads, width]`."""
    generator = torch.Generator().manual_seed(seed * 1009 + layer * 31 + part)
    heads = 1 if model.is_whole(part) else model.heads
    return torch.randn(num_tokens, heads, model.widths[part], generator=generator).to(model.dtype_of(part))


def quantized(kv: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Quantizes `[tokens, heads, width]`, written down without the product's function."""
    return (kv * (1.0 / scale) + offset).round().clamp(-128, 127).to(torch.int8)


def make_caches(
    model: Model, side: Side, rank: int, pp_rank: int, device: str, packed: bool = False
) -> dict[str, tuple[torch.Tensor, ...]]:
    """vllm-ascend's shape: per layer a tuple of `[num_blocks, block_size, heads, width]`, each with an offset into
    its allocation, aligned for the device; head-major: `[num_blocks, heads, block_size, width]`. `packed`: as decode
    keeps them."""
    alignment = REGISTRATION_BYTES if device == "npu" else 64
    caches = {}
    for place, layer in enumerate(side.layers_of(pp_rank, model)):
        if side.buffers and place >= side.buffers:
            caches[layer_name(layer)] = caches[layer_name(layer - side.buffers)]
            continue
        parts = []
        for part, width in enumerate(model.widths):
            heads = len(model.heads_of(rank % side.tp, side.tp, part))
            shape = (
                (side.num_blocks, side.block_size, heads, width)
                if model.order is Order.TOKEN_MAJOR
                else (side.num_blocks, heads, side.block_size, width)
            )
            in_int8 = packed and model.packing(layer, part) is Packing.INT8_NZ
            dtype = torch.int8 if in_int8 else model.dtype_of(part)
            whole = (
                side.of_part(model, part).block_size // side.block_size
            )  # vllm-ascend has more blocks, not longer ones
            shape = (side.num_blocks * whole, *shape[1:])
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            buffer = aligned_buffer(alignment + nbytes, alignment, device).zero_()
            parts.append(buffer[alignment:].view(dtype).view(shape))
        caches[layer_name(layer)] = tuple(parts)
    return caches


def by_token(model: Model, cache: torch.Tensor, block_size: int = 0) -> torch.Tensor:
    """Returns a view `[num_blocks, tokens, heads, width]`, whatever the order in memory. `block_size`: tokens of a
    block, where blocks of the tensor are shorter."""
    if block_size > cache.shape[1] and model.order is Order.TOKEN_MAJOR:
        return cache.view(-1, block_size, *cache.shape[2:])
    return cache if model.order is Order.TOKEN_MAJOR else cache.transpose(1, 2)


def from_nz(cache: torch.Tensor) -> torch.Tensor:
    """Returns `[num_blocks, tokens, heads, width]` of a cache of this shape that is in NZ order.

    As vllm-ascend's kernels see it: `[num_blocks, heads, width / 32 bytes, tokens, 32 bytes]` (`_nz_5d_view`).
    """
    blocks, tokens, heads, width = cache.shape
    column = 32 // cache.element_size()
    seen = cache.view(blocks, heads, width // column, tokens, column)
    return seen.permute(0, 3, 1, 2, 4).reshape(cache.shape)
