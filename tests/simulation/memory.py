# SPDX-License-Identifier: Apache-2.0
"""What each token's KV is, and a rank's caches with it: eight real bytes for each token, layer and head.

These bytes are a hash of the layer, the head, and all tokens of the request up to this one. So wrong KV differs. A
state is the same hash, of its last token. The last byte is the number of weight updates that the engine had had.
"""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from simulation.scenario import BLOCK, Shape
from vllm_ascend_pd.core.caches import RegisteredCaches, StateSpec, describe
from vllm_ascend_pd.core.layout import LayerSpec
from vllm_ascend_pd.core.states import LayerState, Section
from vllm_ascend_pd.core.topology import sharding

_MOST_HEADS = 4
FULL_LAYERS = 3
"""Layers that see all tokens. Each further cache group has one layer."""
_WIDTH = 4  # 16-bit numbers of a head: eight bytes

_UPDATES = np.uint64(0xFF)

Array: TypeAlias = np.ndarray


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3."""
    x = x.astype(np.uint64)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x


def prefix_hashes(tokens: Sequence[int]) -> Array:
    """Returns for each token a hash of it and of all before it."""
    ids = np.asarray(tokens, dtype=np.uint64)
    return _mix(np.cumsum(_mix(ids * np.uint64(0x9E3779B97F4A7C15) + np.arange(len(ids), dtype=np.uint64))))


@dataclass(frozen=True)
class Group:
    """A cache group of the model."""

    # Tokens that a token sees, itself included. 0: all.
    window: int = 0
    # Whether its blocks hold states.
    is_state: bool = False
    # Ranks of context parallelism that share tokens, block by block.
    ranks: int = 1

    @property
    def span(self) -> int:
        """Tokens of a block, on all ranks together."""
        return BLOCK * self.ranks

    def written(self, table: Array, computed: int, stop: int) -> tuple[Array, Array]:
        """Returns which slots a step writes that computes tokens `[computed, stop)`, and which tokens' hashes.

        A slot is the place of a token: `block * span + offset`. A state's is its block.
        """
        if self.is_state:
            return table[[(stop - 1) // BLOCK]], np.asarray([stop - 1])
        tokens = np.arange(computed, stop)
        return table[tokens // self.span] * self.span + tokens % self.span, tokens

    def read(self, table: Array, first: int, computed: int) -> tuple[Array, Array]:
        """As `written`, of what a step reads that begins after `computed` tokens. `first`: leaves out those before."""
        if self.is_state:
            last = [computed - 1] if computed else []
            return table[[each // BLOCK for each in last]], np.asarray(last, dtype=int)
        if self.window:
            first = max(first, computed + 1 - self.window)
        tokens = np.arange(min(first, computed), computed)
        return table[tokens // self.span] * self.span + tokens % self.span, tokens


class Places:
    """Slots of one cache group, and the prefix hashes of the tokens there."""

    def __init__(self, slots: Array, hashes: Array) -> None:
        self.slots = slots
        self.hashes = hashes

    @functools.cached_property
    def kv(self) -> Array:
        """What must be there, but for the weights: by slot, layer of the model, and head. For all ranks."""
        return _mix(self.hashes[:, None, None] + _SALTS) & ~_UPDATES

    @staticmethod
    def joined(all_of_them: "Sequence[Places]") -> "Places":
        if len(all_of_them) == 1:
            return all_of_them[0]
        return Places(
            np.concatenate([each.slots for each in all_of_them]), np.concatenate([each.hashes for each in all_of_them])
        )


def groups_of(shape: Shape, dcp: int = 1) -> list[Group]:
    windows = [Group(window=each, ranks=dcp) for each in shape.windows]
    return [Group(ranks=dcp), *windows, *([Group(is_state=True)] if shape.states else [])]


def layers_of(shape: Shape) -> list[tuple[str, int]]:
    """Returns the model's layers in order, each with the number of its group."""
    later = range(1, len(groups_of(shape)))
    groups = [0] * FULL_LAYERS
    for each in later:
        groups.insert(2 * each - 1, each)
    return [(f"layers.{n}.attn", group) for n, group in enumerate(groups)]


_MOST_LAYERS = FULL_LAYERS + 2  # a window's, and the states'
_KINDS = np.arange(1, _MOST_LAYERS * _MOST_HEADS + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
_SALTS = _mix(_KINDS).reshape(_MOST_LAYERS, _MOST_HEADS)


@dataclass(frozen=True)
class Layer:
    """A layer's cache on one rank."""

    name: str
    group: int
    # Of the model, and which heads this rank has.
    number: int
    heads: slice
    tensor: torch.Tensor
    # By slot and head.
    content: Array
    block_bytes: int


class Caches:
    """The KV caches of one rank."""

    def __init__(
        self, shape: Shape, blocks: int, tp: int, rank: int, stage: int = 0, stages: int = 1, dcp: int = 1
    ) -> None:
        dealt = sharding(tp, dcp, BLOCK)
        heads = dealt.heads(rank, shape.heads)
        self.groups = groups_of(shape, dcp)
        # Which of the blocks' shares of a span this rank holds.
        self._share = dealt.shares[rank]
        named = list(enumerate(layers_of(shape)))
        size = -(-len(named) // stages)
        # How often this rank's weights were updated.
        self.updates = 0
        self.layers: list[Layer] = []
        specs: dict[str, LayerSpec | StateSpec] = {}
        for number, (name, group) in named[stage * size : (stage + 1) * size]:
            is_state = self.groups[group].is_state
            dimensions = (blocks, len(heads), _WIDTH) if is_state else (blocks, BLOCK, len(heads), _WIDTH)
            tensor = torch.zeros(dimensions, dtype=torch.bfloat16)
            content = tensor.view(torch.int64).numpy().view(np.uint64).reshape(-1, len(heads))
            block_bytes = tensor[0].numel() * 2
            self.layers.append(Layer(name, group, number, slice(heads[0], heads[-1] + 1), tensor, content, block_bytes))
            if is_state:
                section = Section(len(heads), shape.heads, 1)
                state = LayerState((len(heads), _WIDTH), "bfloat16", 2, 0, (section,))
                specs[name] = StateSpec(group, (state,))
            else:
                specs[name] = LayerSpec(group, BLOCK, len(heads), shape.heads, share=dealt.share(rank))
        # Of the layers, in the order of addresses: where they begin, their size, and that of a block, in bytes.
        self._extents = sorted(
            (layer.tensor.data_ptr(), layer.tensor.numel() * 2, layer.block_bytes) for layer in self.layers
        )
        self._begins = [begin for begin, _, _ in self._extents]
        by_name = {layer.name: (layer.tensor,) for layer in self.layers}
        self.registered: RegisteredCaches = describe(by_name, specs, heads_first=False)

    def _mine(self, layer: Layer, places: Places) -> tuple[Array, Array, Array | None]:
        """Returns those of the slots that this rank has, as its own, with what must be there, and their indices; None
        if it has all."""
        group, slots, kv = self.groups[layer.group], places.slots, places.kv[:, layer.number, layer.heads]
        if group.ranks == 1 or group.is_state:
            return slots, kv, None
        offsets = slots % group.span
        indices = np.nonzero(offsets // BLOCK == self._share)[0]
        own = slots // group.span * BLOCK + offsets % BLOCK
        return own[indices], kv[indices], indices

    def fill(self, layer: Layer, places: Places, wrong: Array | None = None) -> None:
        """Writes KV. `wrong`: where it is wrong, as a mask."""
        slots, kv, indices = self._mine(layer, places)
        if wrong is not None:
            kv = kv ^ ((wrong if indices is None else wrong[indices])[:, None] * (_UPDATES + np.uint64(1)))
        layer.content[slots] = kv | np.uint64(self.updates) if self.updates else kv

    def wrong_slots(self, layer: Layer, places: Places) -> list[int]:
        """Returns indices of the slots that have other KV than they must."""
        slots, kv, indices = self._mine(layer, places)
        differ = layer.content[slots] ^ kv > _UPDATES
        if not differ.any():
            return []
        wrong = np.nonzero(differ.any(axis=1))[0]
        return [int(each) for each in (wrong if indices is None else indices[wrong])]

    def updates_of(self, layer: Layer, places: Places) -> set[int]:
        """Returns after how many weight updates the KV in these slots was computed."""
        slots, _, _ = self._mine(layer, places)
        return set(np.unique(layer.content[slots] & _UPDATES).tolist())

    def forget(self) -> None:
        """The memory is freed, and allocated again with other content."""
        for layer in self.layers:
            layer.content[:] = np.uint64(0xDEAD)

    def blocks_at(self, address: int, num_bytes: int) -> range:
        """Returns the blocks of a layer at `address`; none if it is not in the caches."""
        at = bisect.bisect_right(self._begins, address) - 1
        if at >= 0:
            begin, size, block_bytes = self._extents[at]
            offset = address - begin
            if offset < size:
                return range(offset // block_bytes, (offset + max(1, num_bytes) - 1) // block_bytes + 1)
        return range(0)
