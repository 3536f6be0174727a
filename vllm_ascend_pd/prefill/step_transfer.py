# SPDX-License-Identifier: Apache-2.0
"""What one step sends to one decode engine from caches of one geometry: arrays over all requests.

The model's thread builds a `StepTransfer` before the step's first layer. Nothing changes it afterwards: its arrays hold
for every layer of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.layout import BlockKind, Geometry
from vllm_ascend_pd.core.plan import NULL_BLOCK, Offsets, Regroup, Route, Units
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.prefill.transfer import Transfer


@dataclass(frozen=True)
class RequestSlice:
    """Tokens of one request, which become complete in one step."""

    transfer: Transfer
    # The tokens, and this rank's block ids.
    send: Send

    def tokens(self, geometry: Geometry) -> tuple[int, int]:
        """Returns (start, stop) in tokens of `geometry`'s blocks. A state that is sent counts as one token.

        `start` is a multiple of both sides' blocks, so of their entries.
        """
        if geometry.kind is BlockKind.STATE:
            return 0, len(self.send.blocks[geometry.group])
        start, stop = self.send.tokens(geometry.group)
        return start, geometry.complete(stop)


@dataclass(frozen=True, eq=False)
class StepTransfer:
    """Units of several requests that are sent by one route. Regrouped units fit into one staging slot."""

    route: Route
    # How our caches lie in memory.
    geometry: Geometry
    slices: Sequence[RequestSlice]
    # The units that this rank holds and decode wants. Their owner is an index into `slices`.
    units: Units
    # `[units]`: where each unit is, in bytes from block 0 of our tensor.
    src_units: Offsets
    # `[units]`: the id of the decode block that each unit goes to.
    d_blocks: Offsets
    # `src_units` on the cache's device, int64. None unless units are regrouped.
    unit_offsets: torch.Tensor | None

    @cached_property
    def transfers(self) -> list[Transfer]:
        """The transfer of each of `slices`."""
        return [each.transfer for each in self.slices]

    @cached_property
    def ticket_ids(self) -> list[str]:
        """The ticket id of each of `slices`."""
        return [each.transfer.ticket.ticket_id for each in self.slices]

    @property
    def has_failed(self) -> bool:
        """Whether all of its transfers have failed."""
        return all(transfer.failure is not None for transfer in self.transfers)

    @property
    def waits_for_grant(self) -> bool:
        return any(transfer.waits_for_grant for transfer in self.transfers)

    @property
    def decode_engine(self) -> str:
        return self.slices[0].transfer.ticket.remote_engine_id

    def fail(self, reason: str, cause: PushFailure) -> None:
        for transfer in self.transfers:
            transfer.fail(reason, cause)

    def give_up_ungranted(self, reason: str) -> None:
        for transfer in self.transfers:
            if transfer.waits_for_grant:
                transfer.fail(reason, PushFailure.NO_GRANT)


def plan_transfers(
    route: Route,
    geometry: Geometry,
    slices: Sequence[RequestSlice],
    device: Device,
    slot_units: int,
) -> list[StepTransfer]:
    """Returns the step transfers that send `slices` to one decode engine.

    There is one, or several if units are regrouped and do not fit into one staging slot. `slot_units`: how many units a
    slot holds. Raises `DeviceError`.
    """
    group = geometry.group
    ranges = [each.tokens(geometry) for each in slices]
    units = Units.of(route.unit, ranges)
    # All are for one decode engine, so its blocks are of one size.
    span = slices[0].transfer.ticket.span(group)
    firsts = [start // span for start, _ in ranges]
    d_ids = [
        each.transfer.ticket.remote_block_ids[group][first : -(-stop // span)]
        for each, first, (_, stop) in zip(slices, firsts, ranges, strict=True)
    ]
    d_blocks = units.blocks(d_ids, firsts, span)
    # Decode's block table has the null block for tokens that have left its sliding window.
    wanted = d_blocks != NULL_BLOCK
    if geometry.share.ranks > 1:
        wanted &= units.held(geometry.share)
    if not wanted.all():
        units, d_blocks = units.where(wanted), d_blocks[wanted]
    begins = [start // geometry.span for start, _ in ranges]
    p_blocks = units.blocks([each.send.blocks[group] for each in slices], begins, geometry.span)
    if (gone := p_blocks == NULL_BLOCK).any():
        for i in np.unique(units.owner[gone]):
            slices[i].transfer.fail("decode wants tokens that have left prefill's sliding window", PushFailure.UNFIT)
    src_units = units.offsets(p_blocks, geometry)
    if len(src_units) == 0:
        return []
    if route.regroup is Regroup.NONE:
        return [StepTransfer(route, geometry, slices, units, src_units, d_blocks, None)]
    on_device = device.upload(torch.from_numpy(src_units))
    cuts = [slice(first, first + slot_units) for first in range(0, len(src_units), slot_units)]
    if len(cuts) == 1:
        return [StepTransfer(route, geometry, slices, units, src_units, d_blocks, on_device)]
    return [
        StepTransfer(route, geometry, slices, units.cut(at), src_units[at], d_blocks[at], on_device[at]) for at in cuts
    ]
