# SPDX-License-Identifier: Apache-2.0
"""The programs of ranks over caches of several kinds that share memory, as those of DeepSeek V4 do."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from harness.kv import Model
from harness.rank_programs import DecodeRank, PrefillRank
from vllm_ascend_pd.core.layout import LayerSpec, Order
from vllm_ascend_pd.device.base import aligned_buffer

# By cache group and tokens of an entry: (block id, place in the block, the prompt's seed, entry of the prompt).
Rows: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[int, int, int, int]]]


@dataclass(frozen=True)
class CacheView:
    """One tensor of a layer's cache: `[num_blocks, entries, 1, width]`, or `[num_blocks, 1, entries, width]`."""

    layer: str
    part: int
    # The index of the memory that it lies in, and where it begins, in bytes.
    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        typed = memory.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset // self.dtype.itemsize)


@dataclass(frozen=True)
class CompressedModel(Model):
    """Caches as an engine's own code makes them. They are whole on each rank."""

    replicated: bool = True
    # Bytes of each memory, which caches of several groups share.
    memories: tuple[int, ...] = ()
    views: tuple[CacheView, ...] = ()
    specs: tuple[tuple[str, LayerSpec], ...] = ()
    # By layer, in the order in which layers are announced: its caches.
    announced: tuple[tuple[str, ...], ...] = ()


def truth(view: CacheView, seeds: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Returns the right bytes of these entries of prompts: `[entries, bytes]`."""
    width = view.shape[3] * view.dtype.itemsize
    salt = zlib.crc32(f"{view.layer} {view.part}".encode()) + seeds * 15485863
    at = ((entries * 7919 + salt)[:, None] + torch.arange(width) * 104729) % 2147483647
    return (at * 48271 % 2147483647 % 255 + 1).to(torch.uint8)


class _Compressed:
    """What both ranks share. Mixed into the programs."""

    model: CompressedModel
    memories: list[torch.Tensor]
    caches: dict[str, tuple[torch.Tensor, ...]]

    def make(self) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict[str, LayerSpec]]:
        self.memories = [aligned_buffer(size, 4096, "cpu").zero_() for size in self.model.memories]
        caches: dict[str, tuple[torch.Tensor, ...]] = {}
        for view in self.model.views:
            caches[view.layer] = (*caches.get(view.layer, ()), view.over(self.memories[view.memory]))
        return caches, dict(self.model.specs)

    def entries(self, view: CacheView) -> torch.Tensor:
        """Returns a layer's cache as `[num_blocks, entries, width]`."""
        return self.caches[view.layer][view.part].squeeze(1 if self.model.order is Order.HEAD_MAJOR else 2)

    def columns(self, rows: Rows, view: CacheView) -> list[torch.Tensor]:
        """Returns the block, the place in it, the prompt's seed and the entry of each of a cache's rows."""
        spec = dict(self.model.specs)[view.layer]
        return list(torch.tensor(rows.get((spec.group, spec.tokens_per_entry), [])).view(-1, 4).long().T)

    def clear(self) -> None:
        for memory in self.memories:
            memory.zero_()


class CompressedPrefill(_Compressed, PrefillRank):
    model: CompressedModel

    def computed(self, step: Any, rows: Rows) -> None:
        """One forward pass, which computes `rows`. Each layer is announced once for all its caches."""
        self.worker.start_step(step)
        if not step.computes:
            self.worker.end_forward()
            return
        self.write(rows)
        for names in self.model.announced:
            for name in names:
                self.worker.push_layer(name)
        plan = self.worker._plan
        assert not (plan.sends and plan.unpushed), "decode waits for what leaves at the step's end"
        self.worker.end_forward()
        self.worker.end_step()

    def write(self, rows: Rows) -> None:
        for view in self.model.views:
            blocks, places, seeds, entries = self.columns(rows, view)
            self.entries(view)[blocks, places] = truth(view, seeds, entries).view(view.dtype)


class CompressedDecode(_Compressed, DecodeRank):
    model: CompressedModel

    def wrong(self, rows: Rows) -> list[str]:
        """Returns every layer with an entry that is not as in `rows`, and every block of nobody that was written."""
        found = []
        used = {block for of_group in rows.values() for block, *_ in of_group}
        for view in self.model.views:
            cache = self.entries(view)
            blocks, places, seeds, entries = self.columns(rows, view)
            here = cache[blocks, places].contiguous().view(torch.uint8)
            unequal = (here != truth(view, seeds, entries)).any(dim=1)
            if unequal.any():
                found.append(f"{view.layer} part {view.part}: entries {entries[unequal].tolist()[:9]}")
            touched = cache.contiguous().view(torch.uint8).flatten(1).any(dim=1).nonzero().flatten().tolist()
            found += [f"{view.layer}: block {block} belongs to nobody" for block in set(touched) - used]
        return found
