# SPDX-License-Identifier: Apache-2.0
"""KV caches without a model: their shapes, and the right value of every byte in them."""

from dataclasses import dataclass, replace

import torch

from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.device.base import aligned_buffer
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES


@dataclass(frozen=True)
class Model:
    """`widths`: bytes-carrying elements per head and token of each part: (head size, head size) for K and V,
    (512, 64) for MLA's latent and rope parts, (2 * head size,) where K and V are packed. `dtypes`: theirs, where they
    differ."""

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

    @property
    def draft_layers(self) -> range:
        return range(self.layers - self.drafts, self.layers)

    def dtype_of(self, part: int) -> torch.dtype:
        return self.dtypes[part] if self.dtypes else self.dtype

    def is_whole(self, part: int) -> bool:
        return self.replicated or (self.whole_from is not None and part >= self.whole_from)

    def heads_of(self, rank: int, tp: int, part: int = 0) -> range:
        return range(1) if self.is_whole(part) else sharding(tp).heads(rank, self.heads)


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


def make_caches(model: Model, side: Side, rank: int, pp_rank: int, device: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """vllm-ascend's shape: per layer a tuple of `[num_blocks, block_size, heads, width]`, each with an offset into
    its allocation, aligned for the device; head-major: `[num_blocks, heads, block_size, width]`."""
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
            dtype = model.dtype_of(part)
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
