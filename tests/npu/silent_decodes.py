# SPDX-License-Identifier: Apache-2.0
"""Many decode engines of one rank each, in one process."""

import os
from typing import Any

import torch

from harness.kv import Model, Prompt, Side
from harness.rank_programs import DecodeRank

OTHERS = 7
"""What the owner of blocks writes into them that decode gave back."""


class Decodes:
    def __init__(self, model: Model, side: Side, init: str, config: dict[str, Any], count: int) -> None:
        self.ranks = []
        start = torch.distributed.init_process_group
        for n in range(count):
            self.ranks.append(DecodeRank(model, side, 0, 0, init, f"silent-{n}", config, "npu", first_device=1))
            torch.distributed.init_process_group = lambda *_, **__: None  # once in a process
        torch.distributed.init_process_group = start

    def process(self) -> int:
        return os.getpid()

    def descriptions(self) -> list[Any]:
        return [rank.description() for rank in self.ranks]

    def steps(self, steps: list[Any]) -> None:
        """Takes a step of each engine."""
        for rank, step in zip(self.ranks, steps, strict=True):
            rank.step(step)

    def arrivals(self) -> list[Any]:
        return [rank.arrivals() for rank in self.ranks]

    def reuse(self, prompts: list[Prompt]) -> None:
        """Gives the blocks of each engine's prompt to another owner."""
        for parts in self._blocks(prompts):
            parts.fill_(OTHERS)
        torch.npu.synchronize()

    def overwritten(self, prompts: list[Prompt]) -> int:
        """Returns how many pieces of those blocks do not hold what their owner wrote."""
        return sum(not bool(parts.eq(OTHERS).all().item()) for parts in self._blocks(prompts))

    def _blocks(self, prompts: list[Prompt]) -> list[torch.Tensor]:
        return [
            cache[block]
            for rank, prompt in zip(self.ranks, prompts, strict=True)
            for parts in rank.caches.values()
            for cache in parts
            for block in prompt.d_blocks
        ]

    def stop(self, reusable: bool) -> list[str]:
        for rank in self.ranks:
            rank.worker.close(5.0)
        return []
