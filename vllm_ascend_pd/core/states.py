# SPDX-License-Identifier: Apache-2.0
"""The states of Mamba and linear attention layers: how they lie in a block, and how ranks share them.

Such a layer keeps a state per request instead of KV per token. The state is in the block that would hold the KV of
the last computed token. It is an array, one dimension of which, its channels, is divided among ranks in sections.
Mamba 2's convolution has the sections x, B and C. So each section is a run of bytes per head, and moves like a
head-major block of one token. If channels are not the outermost dimension, this holds for each row of a section.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.layout import BlockKind, Geometry, Order


@dataclass(frozen=True)
class Section:
    """Neighbouring channels that are divided among ranks by head."""

    # Heads on this rank.
    heads: int
    # Heads of the whole model.
    total_heads: int
    # Channels of a head.
    width: int

    @property
    def channels(self) -> int:
        return self.heads * self.width


@dataclass(frozen=True)
class LayerState:
    """One of a layer's states on this rank."""

    shape: tuple[int, ...]
    dtype: str
    # Bytes of an element.
    itemsize: int
    # The dimension of `shape` that the sections divide.
    axis: int
    sections: tuple[Section, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def partition_states(
    kind: str, tp: int, groups: int | None, conv_axis: int, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[Section, ...]]]:
    """Returns (axis, sections) of each state of a layer: how ranks share it.

    `kind`: name of the layer's kind in vLLM's `MambaAttentionBackendEnum`. `tp`: tensor-parallel size.
    `groups`: Mamba 2's groups of B and C in the whole model. `conv_axis`: the channels' dimension in the convolution's
    state. `shapes`: of the states on this rank.

    A state of an unknown kind counts as one head per rank, so it fits only engines of the same tensor-parallel size.
    """

    def evenly(heads: int, width: int = 1) -> Section:
        return Section(heads, heads * tp, width)

    if kind in ("MAMBA1", "MAMBA2", "GDN_ATTN") and len(shapes) == 2:
        conv, recurrent = shapes
        channels, heads, width = conv[conv_axis], recurrent[0], recurrent[1]
        by_head = (0, (evenly(heads),))
        if kind == "MAMBA1":
            return [(conv_axis, (evenly(channels),)), by_head]
        last = evenly(heads, width)  # Mamba 2's x, Gated DeltaNet's V
        key_width = recurrent[2]
        key_heads, rest = divmod(channels - last.channels, 2 * key_width)
        if key_heads > 0 and rest == 0:
            if kind == "GDN_ATTN":
                keys = evenly(key_heads, key_width)
                return [(conv_axis, (keys, keys, last)), by_head]
            # With fewer groups than ranks, vLLM gives each rank a copy of the group that its heads belong to.
            total = key_heads * tp if groups is None or groups >= tp else groups
            group = Section(key_heads, total, key_width)
            return [(conv_axis, (last, group, group)), by_head]
    if kind == "SHORT_CONV" and len(shapes) == 1:
        return [(conv_axis, (evenly(shapes[0][conv_axis]),))]
    if kind == "LINEAR" and len(shapes) == 1:
        return [(0, (evenly(shapes[0][0]),))]
    return [(0, (Section(1, tp, shape[0]),)) for shape in shapes]


def state_geometries(state: LayerState, group: int, block_stride: int) -> list[tuple[int, Geometry]]:
    """Returns each run of bytes that moves by itself: (offset from the state's first byte, its geometry).

    `block_stride`: bytes from one block to the next.
    """
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
