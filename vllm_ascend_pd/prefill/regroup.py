# SPDX-License-Identifier: Apache-2.0
"""Regroups KV into decode's layout before it is written: gather, all-to-all and interleave; or split; or pack.

The model's thread submits layers. The rest runs in order on the device's side stream. Every rank of a group runs the
same step sends in the same order, even if their requests have failed, so collectives stay aligned (R5). After a
collective has failed, its group runs no more of them (R9, `prefill/regroup.py`).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.caches import Quantize, RegisteredCaches
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.plan import regroupable, slot_bytes
from vllm_ascend_pd.core.prefill_ticket import RunningTime
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.device import ops, ops_fallback
from vllm_ascend_pd.device.base import Device, DeviceError, Event, Group
from vllm_ascend_pd.device.packing import packed
from vllm_ascend_pd.prefill.staging import Slot, StagingRing
from vllm_ascend_pd.prefill.step_send import LayerPush, StepSend
from vllm_ascend_pd.transport.engine import TransferEngine

logger = logging.getLogger(__name__)


class ExchangeGroup:
    """Runs collectives in one process group until one of them fails here, or is missed here.

    Then nobody knows what the other ranks have exchanged, and a later collective could deliver the bytes of another
    layer or request (R5). So this rank runs no more of them. It closes its connections, and the other ranks' next
    collective fails, too: at once over Gloo, within `collective_timeout_s` over HCCL. No rank ever joins again.
    """

    def __init__(self, ranks: tuple[int, ...], group: Group) -> None:
        """`ranks`: the tensor-parallel ranks in `group`, for messages. The group keeps its connections for as long as
        it is referenced: over Gloo by this object alone, over HCCL by torch's own table, too."""
        self._ranks = ranks
        # Written under `_lock`, read without: a collective that runs when another thread breaks the group ends first.
        self._group: Group | None = group
        # Written once, under `_lock`. Any thread reads it. Clients get to read it: it names no addresses.
        self._failure: str | None = None
        self._lock = threading.Lock()

    @property
    def failure(self) -> str | None:
        """Why the group is broken; None while it works."""
        return self._failure

    def run(self, collective: Callable[[Group], None]) -> None:
        """Runs the next collective. The side stream calls it.

        Raises `DeviceError` at once if the group is broken, or if the collective fails, which breaks the group.
        """
        group = self._group
        if group is None:
            raise self._error()
        try:
            collective(group)
        except Exception as error:
            self.fail("an all-to-all failed (see the prefill engine's log)", error)
            raise self._error() from error
        except BaseException as error:
            self.fail("an all-to-all was interrupted", error)
            raise

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Breaks the group for good, because a collective failed on this rank, or this rank missed one. Any thread may
        call it.

        `cause`: for the log; its text may name addresses.
        """
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            self._group = None
        logger.error(
            "Restart this prefill engine: %s%s",
            self._error(),
            "" if cause is None else f": {type(cause).__name__}: {cause}",
        )

    def close(self) -> None:
        """Closes this rank's connections, because the worker shuts down."""
        with self._lock:
            self._failure = self._failure or "the prefill engine shuts down"
            self._group = None

    def _error(self) -> DeviceError:
        return DeviceError(
            f"tensor-parallel ranks {self._ranks} exchange no KV heads until this prefill engine is restarted: "
            f"{self._failure}"
        )


class Regrouper:
    """Regroups the tensors of a layer into a slot of the staging ring."""

    def __init__(
        self,
        device: Device,
        ring: StagingRing[StepSend],
        groups: dict[tuple[int, ...], ExchangeGroup],
        slot_timeout_s: float,
        grant_wait_s: float,
        observer: PrefillObserver,
        quantize: Mapping[tuple[str, int], Quantize],
    ) -> None:
        """Allocates two more buffers of the size of a slot.

        groups: all-to-all groups by the tensor-parallel ranks in them.
        slot_timeout_s: how long a slot may take to become free.
        grant_wait_s: how long a layer without a slot waits while holders of slots wait for grants.
        quantize: what quantizes tensors, by layer and part.
        """
        self._quantize = quantize
        self._slot_timeout_s = slot_timeout_s
        self._grant_wait_s = grant_wait_s
        self._observer = observer
        # Decode engines that other layers have waited for without getting a grant.
        self._waited_in_vain: set[str] = set()
        self._device = device
        self._groups = groups
        self._ring = ring
        self.slot_bytes = ring.slot_bytes
        # What the all-to-all sends and receives. The side stream runs one at a time, so one pair serves all.
        self._send = device.allocate(ring.slot_bytes)
        self._received = device.allocate(ring.slot_bytes)
        # The parts of the two that were exchanged last. All layers of a step exchange the same number of bytes.
        self._exchanged = (self._received, self._send)

    def missed(self, ranks: tuple[int, ...], reason: str) -> None:
        """Breaks the group of `ranks`, because this rank missed a collective. Does nothing if `ranks` is empty."""
        if ranks:
            self._groups[ranks].fail(f"an all-to-all was missed: {reason}")

    @property
    def failure(self) -> str | None:
        """Why a group of this rank is broken; None if none is."""
        return next((group.failure for group in self._groups.values() if group.failure is not None), None)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def submit(self, push: LayerPush, tensors: Sequence[torch.Tensor]) -> Event:
        """Queues the regrouping of a layer on the side stream, into a slot for `push`. Returns its end.

        The model's thread calls it. On NPUs it waits for a slot, for `grant_wait_s` and `slot_timeout_s` at most, and
        not for a layer whose requests have failed. Raises DeviceError if the layer cannot be queued, which also breaks
        the group.
        """

        def regroup() -> None:
            if push.step_send.route.packs:
                slot: Slot | None = self._filled(push.step_send, partial(self._pack, push, tensors))
            else:
                slot = self.run(push.step_send, tensors)
            if slot is not None and not push.fill(slot):  # the sender has stopped waiting for it
                self._ring.release(slot)

        try:
            return self._device.submit(regroup, push.computed)
        except DeviceError as error:
            self.missed(push.step_send.route.ranks, str(error))
            raise

    def run(self, step_send: StepSend, tensors: Sequence[torch.Tensor]) -> Slot | None:
        """Fills a slot and returns it; None if this rank writes none of the units.

        The tensors follow each other in a slot, each `[planes, share, staged_bytes]`. Runs on the side stream.
        """
        route, offsets, share = step_send.route, step_send.unit_offsets, step_send.share
        assert offsets is not None
        if route.ranks:
            per_rank = self._exchange_heads(step_send, tensors)
            if len(step_send.units) == 0:
                return None
            # Tensors follow each other on both sides, so interleaving takes them as one run of entries.
            received = (self._received, 0, per_rank)
            side_by_side = (route.ratio, len(tensors) * share * route.entries, route.source_row)
            out = self._ring.buffer
            if route.planes == 1:
                return self._filled(
                    step_send, lambda slot: ops.interleave_heads(*received, out, slot.offset, *side_by_side)
                )
            ops.interleave_heads(*received, self._send, 0, *side_by_side)
            exchanged = self._send[: per_rank * route.ratio].view(len(tensors), -1)
            tensors, offsets = exchanged.unbind(), step_send.share_offsets
            assert offsets is not None
        return self._filled(
            step_send,
            lambda slot: ops.split_heads(
                tensors,
                offsets,
                route.planes,
                route.entries,
                route.plane_row,
                self._ring.buffer,
                slot.offset,
                step_send.tensor_bytes,
                step_send.plane_bytes,
            ),
        )

    def _pack(self, push: LayerPush, tensors: Sequence[torch.Tensor], slot: Slot) -> None:
        """Fills `slot` with the units of tensors in the form in which decode keeps them. Runs on the side stream."""
        step_send = push.step_send
        route, offsets = step_send.route, step_send.unit_offsets
        assert offsets is not None
        units = len(offsets)
        gathered = self._send[: units * route.source_bytes]
        for n, (described, tensor) in enumerate(zip(push.tensors, tensors, strict=True)):
            ops.gather_units([tensor], offsets, route.source_bytes, units, self._send, 0, len(gathered), len(gathered))
            quantize = self._quantize.get((described.layer, described.part))
            blocks = packed(gathered, tensor, route.entries, quantize)
            out = self._ring.buffer[slot.offset + n * step_send.tensor_bytes :][: step_send.tensor_bytes]
            out.view(blocks.shape).copy_(blocks)

    def _exchange_heads(self, step_send: StepSend, tensors: Sequence[torch.Tensor]) -> int:
        """Receives the group's heads of this rank's share of units. Returns how many bytes each rank has sent."""
        route, share, offsets = step_send.route, step_send.share, step_send.unit_offsets
        section = share * route.source_bytes
        per_rank = section * len(tensors)
        try:
            ops.gather_units(tensors, offsets, route.source_bytes, share, self._send, 0, section, per_rank)
        finally:  # the other ranks wait for the collective even if this rank's part has failed
            num_bytes = per_rank * route.ratio
            if self._exchanged[0].numel() != num_bytes:
                self._exchanged = (self._received[:num_bytes], self._send[:num_bytes])
            self._groups[route.ranks].run(partial(self._device.all_to_all, *self._exchanged))
        # The slot is taken after the collective, so a rank without a free slot still takes part.
        return per_rank

    def _filled(self, step_send: StepSend, fill: Callable[[Slot], None]) -> Slot:
        """Returns a slot that `fill` has filled."""
        slot = self._acquire(step_send)
        try:
            fill(slot)
        except BaseException:
            self._ring.release(slot)
            raise
        return slot

    def _acquire(self, step_send: StepSend) -> Slot:
        """Waits for a slot. Raises TimeoutError.

        Layers that wait for a grant keep their slots. If they have all slots, regrouping stops, and with it the model.
        So other layers wait up to `grant_wait_s` for a decode engine's grants. If no slot becomes free, layers that
        wait for that engine fail and give up their slots. From then on they do so at once, until it grants something.
        """
        if self._waited_in_vain and not step_send.waits_for_grant:
            self._waited_in_vain.discard(step_send.decode_engine)
        if (slot := self._ring.take(step_send)) is not None:
            return slot
        if step_send.has_failed:  # nobody needs what the slot would hold
            raise TimeoutError("no staging slot is free for a layer whose requests have failed")
        began = time.monotonic()
        try:
            return self._await_slot(step_send)
        finally:
            self._observer.backpressure(time.monotonic() - began)

    def _await_slot(self, step_send: StepSend) -> Slot:
        waiting = {holder.decode_engine for holder in self._ring.holders if holder.waits_for_grant}
        if not waiting & self._waited_in_vain:
            with suppress(TimeoutError):
                return self._ring.acquire(step_send, self._grant_wait_s)
        for holder in self._ring.holders:
            if holder.waits_for_grant:
                self._waited_in_vain.add(holder.decode_engine)
                holder.give_up_ungranted("no grant came while all staging slots were taken: other requests need them")
        return self._ring.acquire(step_send, self._slot_timeout_s)


def make_regrouper(
    rank_info: RankInfo,
    config: ConnectorConfig,
    device: Device,
    engine: TransferEngine,
    caches: RegisteredCaches,
    step_tokens: int,
    running_time: RunningTime,
    observer: PrefillObserver,
) -> tuple[StagingRing[StepSend] | None, Regrouper | None]:
    """Returns the staging ring and the regrouper, or None and None if this engine's layout never needs regrouping.

    The answer is the same on all ranks: it depends on the model, the layout and the parallel sizes alone.
    """
    size, slots = slot_bytes(caches.description, step_tokens), config.slots(step_tokens)
    if size == 0:
        return None, None
    buffer = device.allocate(size * slots)
    if not buffer.is_cpu:
        ops_fallback.warn_once()
    engine.register([(buffer.data_ptr(), buffer.numel())])
    movable = regroupable(caches.description.geometries)
    sharding = rank_info.sharding
    wanted = sorted({ranks for g in movable for ranks in topology.regroup_groups(sharding, g.total_heads)})
    groups = device.new_groups(_world_groups(rank_info, wanted), config.collective_timeout_s)
    mine = {}
    for ranks in wanted:
        if rank_info.rank in ranks:
            world = tuple(rank_info.stage_ranks[rank] for rank in ranks)
            mine[ranks] = ExchangeGroup(ranks, groups[world])
    ring: StagingRing[StepSend] = StagingRing(buffer, size, slots, running_time)
    # A slot may rest after a failed write.
    slot_timeout_s = config.write_timeout_s + engine.limits.rest_s
    grant_wait_s = config.control_timeout_s
    return ring, Regrouper(device, ring, mine, slot_timeout_s, grant_wait_s, observer, caches.quantize)


def _world_groups(rank_info: RankInfo, wanted: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the `wanted` groups of every pipeline stage, in ranks of the world.

    All ranks of the world must create all groups, in the same order. vLLM numbers the world with tensor-parallel ranks
    running fastest, then prefill-context-parallel ones.
    """
    stage = len(rank_info.stage_ranks)
    world = torch.distributed.get_world_size() if wanted else 0
    return [tuple(first + rank for rank in ranks) for first in range(0, world, stage) for ranks in wanted]
