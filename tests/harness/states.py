# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention layers.

The truth is a model's whole state; each rank gets its part as vLLM's layers load their weights.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_ascend_pd.core.caches import StateSpec
from vllm_ascend_pd.core.states import LayerState, partition_states
from vllm_ascend_pd.device.base import aligned_buffer
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES

ROWS = 3  # of a convolution with 4 taps
HEADS, HEAD_WIDTH, STATE_WIDTH = 8, 4, 5
SLACK = 16  # bytes that pad a block to the size of attention's
LAYER = "model.layers.0.linear_attn"


@dataclass(frozen=True)
class States:
    """`pieces` of the convolution's channels: (heads, width) each; a piece with fewer heads than ranks is copied."""

    kind: str
    pieces: tuple[tuple[int, int], ...]
    recurrent: tuple[int, ...]
    groups: int | None = None

    def of_rank(self, rank: int, tp: int, conv_axis: int, seed: int = 7) -> list[np.ndarray]:
        """Returns a rank's part of each state. `rank`: its tensor-parallel rank. `seed`: of the request."""
        chance = np.random.default_rng(seed)
        own = []
        for heads, width in self.pieces:
            whole = chance.random((ROWS, heads * width), dtype=np.float32)
            copies = max(1, tp // heads)
            count = max(1, heads // tp) * width
            first = rank // copies * count
            own.append(whole[:, first : first + count])
        conv = np.concatenate(own, axis=1)
        heads = self.recurrent[0] // tp
        recurrent = chance.random(self.recurrent, dtype=np.float32)[rank * heads : (rank + 1) * heads]
        return [conv if conv_axis == 1 else np.ascontiguousarray(conv.T), recurrent]

    def allocate(
        self, rank: int, tp: int, num_blocks: int, conv_axis: int, device: str = "cpu"
    ) -> tuple[torch.Tensor, list[torch.Tensor], StateSpec]:
        """Returns a rank's memory, all zero, views of each state in it, `[num_blocks, ...]`, and what it holds."""
        shapes = [state.shape for state in self.of_rank(rank, tp, conv_axis)]
        dealt = partition_states(self.kind, tp, self.groups, conv_axis, shapes)
        states = tuple(LayerState(shape, "float32", 4, axis, s) for shape, (axis, s) in zip(shapes, dealt, strict=True))
        page = sum(state.nbytes for state in states) + SLACK
        alignment = REGISTRATION_BYTES if device == "npu" else 64
        memory = aligned_buffer(num_blocks * page, alignment, device).zero_().view(torch.int8)
        memory = memory.view(num_blocks, 1, 1, page)
        views, offset = [], 0
        for state in states:
            view = memory[:, 0, 0, offset : offset + state.nbytes].view(torch.float32)
            views.append(view.unflatten(1, state.shape))
            offset += state.nbytes
        return memory, views, StateSpec(1, states)


_RECURRENT = (HEADS, HEAD_WIDTH, STATE_WIDTH)
MAMBA1 = States("MAMBA1", ((32, 1),), (32, STATE_WIDTH))
MAMBA2 = States("MAMBA2", ((HEADS, HEAD_WIDTH), (8, STATE_WIDTH), (8, STATE_WIDTH)), _RECURRENT, 8)
ONE_GROUP = States("MAMBA2", ((HEADS, HEAD_WIDTH), (1, STATE_WIDTH), (1, STATE_WIDTH)), _RECURRENT, 1)
TWO_GROUPS = States("MAMBA2", ((HEADS, HEAD_WIDTH), (2, STATE_WIDTH), (2, STATE_WIDTH)), _RECURRENT, 2)
GATED_DELTA = States("GDN_ATTN", ((8, 6), (8, 6), (16, HEAD_WIDTH)), (16, HEAD_WIDTH, 6))
