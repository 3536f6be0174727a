# SPDX-License-Identifier: Apache-2.0
"""The layer that regroup.py regroups: blocks at random places, on prefill's ranks, for a decode engine with TP 1."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import LayerSpec
from vllm_ascend_pd.core.plan import Units, make_mapping
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import ExchangeGroup, Regrouper, StagingRing
from vllm_ascend_pd.prefill.step_send import LayerPush, Slot, StepSend

HEADS, HEAD_SIZE, BLOCK = 8, 128, 128  # of the model; bfloat16
LAYER = "model.layers.0.self_attn.attn"


@dataclass(frozen=True)
class Layer:
    """One layer's K and V. If there are fewer tokens than a block has, the whole block is regrouped."""

    ranks: int  # of prefill
    tokens: int

    @property
    def num_blocks(self) -> int:
        return math.ceil(self.tokens / BLOCK)

    @property
    def heads(self) -> int:
        """KV heads of a rank."""
        return HEADS // self.ranks

    def blocks(self) -> list[int]:
        generator = torch.Generator().manual_seed(1)
        return (1 + torch.randperm(2 * self.num_blocks, generator=generator)[: self.num_blocks]).tolist()

    def caches(self, rank: int) -> list[Tensor]:
        """Returns K and V as vllm-ascend registers them, `[num_blocks, block, heads, head size]`."""
        return [part[:, :, rank * self.heads : (rank + 1) * self.heads].contiguous() for part in self._kv()]

    def expected(self, rank: int, blocks: Sequence[int]) -> Tensor:
        """Returns what a rank has to write to decode: all heads of its share of the blocks, K then V."""
        share = math.ceil(len(blocks) / self.ranks)
        return self._kv()[:, list(blocks)[rank * share : (rank + 1) * share]].contiguous()

    def reference_expected(self, rank: int, blocks: Sequence[int]) -> Tensor:
        """Returns what a rank of vllm-ascend's has to write: all heads of its share of each block's tokens."""
        share = BLOCK // self.ranks
        return self._kv()[:, list(blocks), rank * share : (rank + 1) * share].contiguous()

    def _kv(self) -> Tensor:
        """Returns K and V of all heads, `[2, num_blocks, block, heads of the model, head size]`."""
        generator = torch.Generator().manual_seed(2)
        shape = (2, 2 * self.num_blocks + 1, BLOCK, HEADS, HEAD_SIZE)
        return torch.randn(shape, generator=generator).bfloat16()


def check_bytes(side: str, got: Tensor, wanted: Tensor) -> None:
    """Raises RuntimeError unless `got` begins with `wanted`. It may be longer, since devices allocate whole pages."""
    if not torch.equal(got.cpu().flatten()[: wanted.numel()].view(wanted.shape), wanted):
        raise RuntimeError(f"{side} left other bytes than decode expects")


def our_side(
    layer: Layer, rank: int, device: Device, caches: Sequence[Tensor], timeout_s: float
) -> tuple[Callable[[], Slot | None], StagingRing]:
    """Returns a function by which ours regroups the layer into a slot of the ring, and the ring, which has one slot."""
    spec = LayerSpec(group=0, block_size=BLOCK, heads=layer.heads, total_heads=HEADS)
    registered = describe({LAYER: tuple(caches)}, {LAYER: spec}, heads_first=False)
    [geometry] = registered.description.geometries
    mapping = make_mapping(geometry, rank, sharding(layer.ranks), sharding(1), BLOCK)
    most, own = mapping.share(layer.num_blocks)
    slot_bytes = 2 * most * layer.ranks * mapping.source_bytes
    ring = StagingRing(device.allocate(slot_bytes), slot_bytes, 1, RunningTime())
    group = device.new_groups([mapping.ranks], timeout_s)[mapping.ranks]
    exchange = ExchangeGroup(mapping.ranks, group)
    unused: Any = None
    config: Any = SimpleNamespace(control_timeout_s=timeout_s, write_timeout_s=timeout_s)
    engine: Any = SimpleNamespace(limits=SimpleNamespace(rest_s=0.0))
    regrouper = Regrouper(PrefillRank(unused, config, device, engine, registered), ring, {mapping.ranks: exchange})
    offsets = torch.tensor(layer.blocks()) * geometry.block_stride
    units = Units.of(BLOCK, [(0, layer.num_blocks * BLOCK)]).cut(own)
    nowhere = np.empty(0, dtype=np.int64)
    on_device = offsets.to(caches[0].device)
    step_send = StepSend(mapping, geometry, [], units, nowhere, nowhere, unit_offsets=on_device, plane_units=most)
    computed = device.record_event()

    def regroup() -> Slot | None:
        push = LayerPush(LAYER, step_send, registered.description.tensors, computed, computed)
        regrouper.run(push, registered.tensors)
        return push.take_staging_slot()

    return regroup, ring
