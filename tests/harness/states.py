# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention layers, and the programs of ranks that have them beside attention's caches.

The truth is a model's whole state; each rank gets its part as vLLM's layers load their weights.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from harness.kv import Model, Prompt
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair
from vllm_ascend_pd.core.caches import StateSpec
from vllm_ascend_pd.core.states import LayerState, partition_states
from vllm_ascend_pd.core.ticket import Ticket
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


@dataclass(frozen=True)
class HybridModel(Model):
    """Layers of attention and one with a state, in cache groups of their own."""

    states: States = field(default=GATED_DELTA)


class _Hybrid:
    """What both ranks share. Mixed into the programs."""

    model: HybridModel
    views: list[torch.Tensor]

    def make(self) -> tuple[dict[str, Any], dict[str, Any]]:
        caches, specs = super().make()  # type: ignore[misc]
        tp = self.side.tp
        memory, self.views, spec = self.model.states.allocate(self.rank % tp, tp, self.side.num_blocks, 1, self.on)
        return {**caches, LAYER: (memory,)}, {**specs, LAYER: spec}

    def right(self, seed: int) -> list[torch.Tensor]:
        states = self.model.states.of_rank(self.rank % self.side.tp, self.side.tp, 1, seed)
        return [torch.from_numpy(state) for state in states]


class HybridPrefill(_Hybrid, PrefillRank):
    """Each step changes a request's state in place."""

    def values(self, layer: int, step: Any, prompts: dict[str, Prompt]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        copies = super().values(layer, step, prompts)
        if layer == 0:
            for send in step.sends:
                prompt = prompts[send.request_id]
                right = self.right(prompt.seed if send.last else prompt.seed + 1000 + send.stop)
                copies += [(view[prompt.states[0]], state) for view, state in zip(self.views, right, strict=True)]
        return copies


class HybridDecode(_Hybrid, DecodeRank):
    def differences(self, prompts: list[Prompt]) -> list[str]:
        found = super().differences(prompts)
        for part, view in enumerate(each.cpu() for each in self.views):
            for prompt in prompts:
                if not torch.equal(view[prompt.states[1]], self.right(prompt.seed)[part]):
                    found.append(f"{prompt.request_id} state {part}")
                view[prompt.states[1]] = 0
            found += [f"state {part}: block {n} belongs to nobody" for n, block in enumerate(view) if block.any()]
        return found


class HybridPair(Pair):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, programs=(HybridPrefill, HybridDecode))

    def ticket(self, prompt: Prompt) -> Ticket:
        ids, sizes = [prompt.d_blocks, [prompt.states[1]]], [self.decode.block_size, 1]
        return msgspec.structs.replace(super().ticket(prompt), remote_block_ids=ids, remote_block_size=sizes)


def with_states(prompts: list[Prompt]) -> list[Prompt]:
    """Returns the prompts with a block for each one's state on either side."""
    return [replace(prompt, states=(3 + 2 * n, 2 + 3 * n)) for n, prompt in enumerate(prompts)]
