# SPDX-License-Identifier: Apache-2.0
"""Describes the KV cache tensors that vLLM registers, and their memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec
import torch

from vllm_ascend_pd.core.ascend import Region, aligned, merge
from vllm_ascend_pd.core.layout import (
    CacheTensor,
    Geometry,
    LayerSpec,
    LayoutError,
    Order,
    Packing,
    RankCaches,
    block_geometry,
)
from vllm_ascend_pd.core.states import LayerState, state_geometries

# Cache groups: which of a request's blocks hold which of its tokens.


@dataclass(frozen=True)
class TokenGroup:
    """A group of attention caches: its blocks hold the KV of tokens."""

    # Tokens that a block stands for on one rank.
    block_size: int
    # How many ranks of context parallelism share a request's tokens.
    ranks: int = 1
    # Whether vLLM reuses blocks of tokens that the next token does not see.
    windowed: bool = False
    # How many tokens a token sees, itself included. 0: all, unless `chunk` says otherwise.
    window: int = 0
    # A token sees those of its own chunk of so many tokens. 0: there are no chunks.
    chunk: int = 0
    # Tokens that one entry of a block is computed from: the fewest of the group's layers.
    tokens_per_entry: int = 1
    # Whether blocks hold states and not tokens.
    holds_state = False

    @property
    def span(self) -> int:
        """How many of a request's tokens a block id stands for, on all ranks together."""
        return self.block_size * self.ranks

    @property
    def ticket_block_size(self) -> int:
        """The block size that tickets name for this group."""
        return self.block_size

    def seen_from(self, token: int) -> int:
        """Returns the first token that token number `token` sees."""
        first = [max(0, token + 1 - self.window)] if self.window else []
        if self.chunk:
            first.append(token - token % self.chunk)
        return min(first, default=0)

    def holding(self, blocks: Sequence[int], start: int, stop: int, last: bool) -> list[int]:
        """Returns those of a request's `blocks` that hold tokens `[start, stop)`. `last`: the prompt ends there.

        Tokens after the last complete entry are in no block: vllm-ascend allocates none for them, vLLM may.
        """
        stop -= stop % self.tokens_per_entry
        return list(blocks[start // self.span : math.ceil(stop / self.span)])


@dataclass(frozen=True)
class StateGroup:
    """A group of state caches: a block holds the state after the last computed one of its tokens.

    Only the state after the prompt's last token is sent. Tickets treat it as a block of one token.
    """

    # Tokens per block.
    block_size: int
    holds_state = True
    windowed = False
    tokens_per_entry = 1
    ticket_block_size = 1

    def holding(self, blocks: Sequence[int], start: int, stop: int, last: bool) -> list[int]:
        """As in `TokenGroup`. Without `last` there is none."""
        return [blocks[(stop - 1) // self.block_size]] if last else []


CacheGroup: TypeAlias = TokenGroup | StateGroup


def left_to_decode(groups: Iterable[CacheGroup]) -> int:
    """Returns how many of a prompt's last tokens prefill does not deliver: 0 or 1.

    Decode computes the last token anyway, and KV may be written twice. Two kinds of caches must not have that token
    yet: a state, which has seen all tokens before it; and a window, since vLLM keeps the blocks that the next token
    after the received ones sees, and that token must be the last one.
    """
    return int(any(group.holds_state or group.windowed for group in groups))


@dataclass(frozen=True)
class BlockNeeds:
    """How many blocks requests take of the pool that all cache groups share."""

    # Per cache group: the group, and the most blocks that a request has of it at a time.
    groups: tuple[tuple[CacheGroup, int], ...]
    # Blocks of the pool that requests may have.
    pool: int
    # Tokens behind a request's own that it has blocks for: drafts.
    lookahead: int = 0

    def of(self, tokens: int) -> int:
        """Returns the most blocks that a request of so many tokens has at a time. Cached ones count, too."""
        return sum(
            most if isinstance(group, StateGroup) else min(most, math.ceil((tokens + self.lookahead) / group.span))
            for group, most in self.groups
        )

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return sum(most for _, most in self.groups)

    @property
    def beside_longest(self) -> int:
        """Blocks that the longest request leaves."""
        return max(0, self.pool - self.longest)


# Two regions of a storage with at most so many bytes between them are registered as one, as in vllm-ascend: the number
# of regions is limited (`core/ascend.py`).
_SMALL_GAP = 4096

KVCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

Quantize: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Returns KV `[tokens, heads, head size]` in int8, by the scales of one layer's tensor."""


@dataclass(frozen=True)
class StateSpec:
    """What a block of a Mamba or linear attention layer holds."""

    # vLLM's cache group.
    group: int
    # In the order in which they lie in the block.
    states: tuple[LayerState, ...]


class LayerTensors(NamedTuple):
    """The tensors of one layer that have one geometry."""

    described: tuple[CacheTensor, ...]
    # In the same order.
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RegisteredCaches:
    """A rank's caches.

    A tensor that holds several states is described by its runs of bytes, and listed once for each. A layer that only
    reads another layer's cache has no tensors. Layers that use a buffer in turn have a tensor each, at one address.
    """

    description: RankCaches
    # In the order of `description.tensors`.
    tensors: tuple[torch.Tensor, ...]
    # By layer: indices into `tensors`.
    layers: dict[str, tuple[int, ...]]
    # Pairs of layers that overwrite each other's KV in each step, because they use a buffer in turn.
    sharing_buffers: tuple[tuple[str, str], ...] = ()
    # By layer and part: what quantizes a tensor on its way to decode.
    quantize: Mapping[tuple[str, int], Quantize] = field(default_factory=dict)

    def regions(self) -> list[Region]:
        """Returns the memory of all tensors.

        Each begins at a multiple of `ALIGNMENT` if its storage begins early enough. Tensors of one storage with small
        gaps between them are one region. A region never spans two storages, which may be two allocations.
        """
        by_storage: dict[int, list[Region]] = {}
        for tensor in self.tensors:
            storage = tensor.untyped_storage().data_ptr()
            region = aligned((tensor.data_ptr(), _extent(tensor)), storage)
            by_storage.setdefault(storage, []).append(region)
        return [region for regions in by_storage.values() for region in merge(regions, gap=_SMALL_GAP)]

    @functools.cached_property
    def layers_by_geometry(self) -> dict[str, dict[int, LayerTensors]]:
        """By layer and index of a geometry: the layer's tensors of that geometry."""
        grouped: dict[str, dict[int, LayerTensors]] = {}
        for layer, indices in self.layers.items():
            alike = grouped[layer] = {}
            for index in indices:
                described, tensor = self.description.tensors[index], self.tensors[index]
                known = alike.get(described.geometry, LayerTensors((), ()))
                alike[described.geometry] = LayerTensors((*known.described, described), (*known.tensors, tensor))
        return grouped


def describe(
    kv_caches: Mapping[str, KVCache],
    specs: Mapping[str, LayerSpec | StateSpec],
    *,
    heads_first: bool,
    readers: Container[str] | None = None,
    quantize: Mapping[tuple[str, int], Quantize] | None = None,
) -> RegisteredCaches:
    """Describes the KV caches of a rank.

    `kv_caches`: by layer, a tensor or several, of shape `[num_blocks, ...]` each.
    `specs`: by layer, what they hold.
    `heads_first`: whether heads come before tokens if a tensor's shape does not decide it.
    `readers`: layers that read another layer's cache. Other layers of one group at one address use it in turn. None:
        all layers at one address share a cache.
    `quantize`: on prefill, what quantizes tensors that decode keeps in int8, by layer and part.

    Raises LayoutError.
    """
    geometries: dict[Geometry, int] = {}
    described: list[CacheTensor] = []
    tensors: list[torch.Tensor] = []
    layers: dict[str, tuple[int, ...]] = {}
    # By address and geometry: the layer that has it.
    known: dict[tuple[int, int], str] = {}
    sharing_buffers: list[tuple[str, str]] = []
    for layer, cache in kv_caches.items():
        whole = (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)
        if layer not in specs:
            if {tensor.data_ptr() for tensor in whole} <= {tensor.base for tensor in described}:
                layers[layer] = ()  # a layer that reads another's cache, of which only ranks know
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
            if (earlier := known.get((base, index))) is not None:
                if readers is None or layer in readers or earlier == layer:
                    continue  # the cache of an earlier layer, which this one shares
                sharing_buffers.append((earlier, layer))
            known[base, index] = layer
            scales = spec.scales[part] if isinstance(spec, LayerSpec) and spec.scales else ""
            described.append(CacheTensor(layer, part, base, tensor.shape[0], index, scales))
            tensors.append(tensor)
        layers[layer] = tuple(range(first, len(tensors)))
    caches = RankCaches(tuple(geometries), tuple(described))
    return RegisteredCaches(caches, tuple(tensors), layers, tuple(sharing_buffers), quantize or {})


# A tensor, an offset in bytes from its start, and the geometry of the blocks from there on.
_Run: TypeAlias = tuple[torch.Tensor, int, Geometry]


def _tokens(cache: Sequence[torch.Tensor], spec: LayerSpec, heads_first: bool) -> list[_Run]:
    runs: list[_Run] = []
    if spec.packings and len(spec.packings) != len(cache):
        raise LayoutError(f"{len(cache)} tensors where decode keeps {len(spec.packings)} in NZ order")
    for part, whole in enumerate(cache):
        copied = spec.copied_from is not None and part >= spec.copied_from
        held = spec.of_copied() if copied else spec
        if whole.dim() == 3 and held.heads == held.total_heads == 1:
            whole = whole.unsqueeze(2)  # an index without a dimension of heads: MiniMax-M3's in vllm-ascend 0.30
        tensor = _by_blocks(whole, held.block_size // held.tokens_per_entry, heads_first)
        shape, strides, dtype = tensor.shape, tensor.stride(), _dtype(tensor, spec.encoding)
        geometry = block_geometry(shape, strides, tensor.element_size(), dtype, held, heads_first=heads_first)
        geometry = msgspec.structs.replace(geometry, copied=copied)
        if spec.packings:
            geometry = _packed(geometry, tensor, spec.packings[part], spec.is_packed)
        runs.append((tensor, 0, geometry))
    return runs


def _packed(geometry: Geometry, tensor: torch.Tensor, packing: Packing, is_packed: bool) -> Geometry:
    """Returns the geometry of a tensor that decode keeps in the form `packing`. `is_packed`: it is decode's."""
    in_8_bits = is_packed and packing is Packing.INT8_NZ
    if tensor.dtype not in ((torch.int8,) if in_8_bits else (torch.bfloat16, torch.float16)):
        expected = "int8" if in_8_bits else "bfloat16 or float16"
        raise LayoutError(f"a cache of {tensor.dtype} is not supported where decode keeps int8: expected {expected}")
    if geometry.order is not Order.TOKEN_MAJOR:
        raise LayoutError("a head-major cache, which decode would keep in NZ order")
    return msgspec.structs.replace(
        geometry, packing=packing, order=Order.HEAD_MAJOR if is_packed else Order.TOKEN_MAJOR
    )


def _dtype(tensor: torch.Tensor, encoding: str | None) -> str:
    """Returns the element type for both sides to compare. Two encodings of uint8 differ."""
    if tensor.dtype is torch.uint8 and encoding is not None:
        return encoding
    return str(tensor.dtype).removeprefix("torch.")


def _by_blocks(tensor: torch.Tensor, entries: int, heads_first: bool) -> torch.Tensor:
    """Returns the tensor as `[num_blocks, entries, ...]`.

    In models that also have states, vllm-ascend makes blocks long. Its kernels see each as several short blocks.
    """
    number, tokens = tensor.shape[:2]
    if heads_first or entries in tensor.shape[1:3] or entries % tokens or not tensor.is_contiguous():
        return tensor
    if number * tokens % entries:
        return tensor
    return tensor.view(-1, entries, *tensor.shape[2:])


def _states(cache: Sequence[torch.Tensor], spec: StateSpec) -> list[_Run]:
    """Describes states that lie one after the other in the blocks of one tensor, or in a tensor each."""
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
    """Returns the bytes from the tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
