# SPDX-License-Identifier: Apache-2.0
"""How the states of Mamba and linear attention layers lie in a block, and how ranks share them.

Such a layer keeps no KV per token but a state per request: in the block that would hold the KV of the last token
computed. A state is an array of which one dimension, its channels, is dealt out over ranks, in sections: those of
Mamba 2's convolution are x, B and C, each dealt out by itself. So each section (and within it each row, where
channels are not the outermost dimension) is a run of bytes per head, and moves as a head-major block of one
token would.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.layout import BlockKind, Geometry, Order


@dataclass(frozen=True)
class Section:
    """Neighbouring channels that are dealt out by head: `heads` of `total_heads`, `width` channels each."""

    heads: int
    total_heads: int
    width: int

    @property
    def channels(self) -> int:
        return self.heads * self.width


@dataclass(frozen=True)
class LayerState:
    """One of a layer's states on this rank. `axis`: the dimension of `shape` that the sections divide."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    axis: int
    sections: tuple[Section, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class StatePartition:
    """What decides how a layer's states are shared: its kind (the name of vLLM's `MambaAttentionBackendEnum`), the
    tensor-parallel size, the groups of B and C in the whole model (Mamba 2) and which dimension of the
    convolution's state its channels are."""

    kind: str
    tp: int
    groups: int | None
    conv_axis: int


def partition_states(
    dealing: StatePartition, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[Section, ...]]]:
    """(axis, sections) of each state of a layer.

    States of an unknown kind are one head per rank: they fit engines of the same tensor-parallel size only.
    """
    tp, axis = dealing.tp, dealing.conv_axis

    def evenly(heads: int, width: int = 1) -> Section:
        return Section(heads, heads * tp, width)

    if dealing.kind in ("MAMBA1", "MAMBA2", "GDN_ATTN") and len(shapes) == 2:
        conv, recurrent = shapes
        channels, heads, width = conv[axis], recurrent[0], recurrent[1]
        by_head = (0, (evenly(heads),))
        if dealing.kind == "MAMBA1":
            return [(axis, (evenly(channels),)), by_head]
        last = evenly(heads, width)  # Mamba 2's x, Gated DeltaNet's V
        key_width = recurrent[2]
        key_heads, rest = divmod(channels - last.channels, 2 * key_width)
        if key_heads > 0 and rest == 0:
            if dealing.kind == "GDN_ATTN":
                keys = evenly(key_heads, key_width)
                return [(axis, (keys, keys, last)), by_head]
            # Fewer groups than ranks: vLLM gives each rank a copy of the one its heads belong to.
            total = key_heads * tp if dealing.groups is None or dealing.groups >= tp else dealing.groups
            group = Section(key_heads, total, key_width)
            return [(axis, (last, group, group)), by_head]
    if dealing.kind == "SHORT_CONV" and len(shapes) == 1:
        return [(axis, (evenly(shapes[0][axis]),))]
    if dealing.kind == "LINEAR" and len(shapes) == 1:
        return [(0, (evenly(shapes[0][0]),))]
    return [(0, (Section(1, tp, shape[0]),)) for shape in shapes]


def state_geometries(state: LayerState, group: int, block_stride: int) -> list[tuple[int, Geometry]]:
    """Each run of bytes that moves by itself: its offset from the state's first byte, and how it lies in blocks
    `block_stride` bytes apart."""
    rows = math.prod(state.shape[: state.axis])
    channel_bytes = math.prod(state.shape[state.axis + 1 :]) * state.itemsize
    runs = []
    for row in range(rows):
        channel = row * state.shape[state.axis]
        for section in state.sections:
            geometry = Geometry(
                group=group,
                order=Order.HEAD_MAJOR,
                dtype=state.dtype,
                block_size=1,
                block_stride=block_stride,
                heads=section.heads,
                total_heads=section.total_heads,
                head_bytes=section.width * channel_bytes,
                kind=BlockKind.STATE,
            )
            runs.append((channel * channel_bytes, geometry))
            channel += section.channels
    return runs
