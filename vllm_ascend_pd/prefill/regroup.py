# SPDX-License-Identifier: Apache-2.0
"""Regroups KV into decode's layout before it is written: gather, all-to-all and interleave; or split; or pack.

The model's thread submits layers. The rest runs in order on the device's side stream. Every rank of a group runs the
same step sends in the same order, even if their requests have failed, so collectives stay aligned (R5). After a
collective has failed, its group runs no more of them (R9).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.observer import PushDelayed
from vllm_ascend_pd.core.plan import regroupable, slot_bytes
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.device import ops, ops_fallback
from vllm_ascend_pd.device.base import Group
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.device.packing import packed
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.step_send import LayerPush, Slot, StepSend

logger = logging.getLogger(__name__)


# How often, in seconds, to look whether a slot has rested for long enough.
LOOK_S = 0.5


class StagingRing:
    """Registered memory where regrouped KV waits to be sent. Each layer in flight has a slot, for a step send.

    The side stream takes slots, and senders give them back in any order. Any thread may call it. After a failed write a
    slot rests until nothing can read it any more.
    """

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, slots: int, running_time: RunningTime) -> None:
        """`buffer`: uint8 `[n]`, with room for `slots` slots of `slot_bytes` bytes."""
        assert buffer.numel() >= slot_bytes * slots
        self.buffer = buffer
        self.slot_bytes = slot_bytes
        first = buffer.data_ptr()
        self._free = [Slot(n * slot_bytes, first + n * slot_bytes) for n in range(slots)]
        # The holder of each slot that is taken.
        self._holders: dict[Slot, StepSend] = {}
        # Slots that rest, and until when, in running time.
        self._resting: list[tuple[float, Slot]] = []
        self._running_time = running_time
        # Guards the three above. A condition's own methods are Python and slower, and every layer takes this lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def holders(self) -> list[StepSend]:
        """The holders of the slots that are taken."""
        with self._lock:
            return list(self._holders.values())

    def take(self, holder: StepSend) -> Slot | None:
        """Returns a slot, or None if none is free."""
        with self._lock:
            self.free_rested()
            if not self._free:
                return None
            slot = self._free.pop()
            self._holders[slot] = holder
            return slot

    def acquire(self, holder: StepSend, timeout_s: float) -> Slot:
        """Waits for a free slot. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (slot := self.take(holder)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no staging slot became free in {timeout_s:g} s: the link does not keep up")
                self._changed.wait(min(left, LOOK_S) if self._resting else left)
        return slot

    def release(self, slot: Slot, settled_at: float = 0.0) -> None:
        """Takes a slot back. `settled_at`: the running time at which nothing reads it any more; 0 for now."""
        with self._lock:
            del self._holders[slot]  # KeyError: it was free
            if settled_at:
                self._resting.append((settled_at, slot))
                self.free_rested()
            else:
                self._free.append(slot)
            self._changed.notify()

    def free_rested(self) -> bool:
        """Returns whether a slot rests. Frees those that have rested long enough.

        While a slot rests, call this every `LOOK_S` seconds, because running time advances only when it is read.
        """
        if not self._resting:
            return False
        with self._lock:
            now = self._running_time()
            self._free += [slot for until, slot in self._resting if until <= now]
            self._resting = [(until, slot) for until, slot in self._resting if until > now]
            return bool(self._resting)


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
        # Why the group is broken; None while it works. Written once, under `_lock`. Any thread reads it. Clients get to
        # read it: it names no addresses.
        self.failure: str | None = None
        self._lock = threading.Lock()

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
            if self.failure is not None:
                return
            self.failure = reason
            self._group = None
        logger.error(
            "Restart this prefill engine: %s%s",
            self._error(),
            "" if cause is None else f": {type(cause).__name__}: {cause}",
        )

    def close(self) -> None:
        """Closes this rank's connections, because the worker shuts down."""
        with self._lock:
            self.failure = self.failure or "the prefill engine shuts down"
            self._group = None

    def _error(self) -> DeviceError:
        return DeviceError(
            f"tensor-parallel ranks {self._ranks} exchange no KV heads until this prefill engine is restarted: "
            f"{self.failure}"
        )


class Regrouper:
    """Regroups the tensors of a layer into a slot of the staging ring."""

    def __init__(self, rank: PrefillRank, ring: StagingRing, groups: Mapping[tuple[int, ...], ExchangeGroup]) -> None:
        """Allocates two more buffers of the size of a slot. `groups`: by the tensor-parallel ranks in them."""
        self._rank = rank
        self._device = rank.device
        self._grant_wait_s, self._slot_timeout_s = _slot_waits_s(rank)
        # Decode engines that other layers have waited for without getting a grant.
        self._engines_without_grant: set[str] = set()
        self._groups = groups
        self.ring = ring
        # What the all-to-all sends and receives. The side stream runs one at a time, so one pair serves all. What is
        # packed or divided passes through the first one, too.
        self._send_buffer = rank.device.allocate(ring.slot_bytes)
        self._receive_buffer = rank.device.allocate(ring.slot_bytes)
        # (received, sent) of the last all-to-all, as views. All layers of a step exchange the same number of bytes.
        self._exchanged = (self._receive_buffer, self._send_buffer)

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

    def submit(self, push: LayerPush, tensors: Sequence[torch.Tensor]) -> bool:
        """Queues the regrouping of a layer on the side stream, into a slot for `push`.

        Returns False if it cannot be queued. That fails the layer's requests, and breaks the group. The model's thread
        calls it. On NPUs it waits for a slot, for `_grant_wait_s` and `_slot_timeout_s` at most, and not for a layer
        whose requests have failed.
        """
        try:
            push.ready = self._device.submit(partial(self.run, push, tensors), push.computed)
        except DeviceError as error:
            self.missed(push.step_send.mapping.ranks, str(error))
            push.step_send.fail(f"layer {push.layer} could not be regrouped: {error}", PushFailure.DEVICE)
            return False
        return True

    def run(self, push: LayerPush, tensors: Sequence[torch.Tensor]) -> None:
        """Fills a slot and hands it over, unless this rank writes none of the units.

        The tensors follow each other in a slot, each `[planes, plane_units, staged_bytes]`. Runs on the side stream.
        """
        step_send = push.step_send
        if step_send.mapping.ranks:
            self._exchange_heads(step_send, tensors)
            if len(step_send.units) == 0:
                return
        # The slot is taken after the collective, so a rank without a free slot still takes part.
        slot, waited_s = self._acquire(step_send)
        try:
            if waited_s:
                self._rank.observer.on(PushDelayed(waited_s))
            if step_send.mapping.packs:
                self._pack(push, tensors, slot)
            else:
                self._arrange(step_send, tensors, slot)
        except BaseException:
            self.ring.release(slot)
            raise
        if not push.fill(slot):  # the sender has stopped waiting for it
            self.ring.release(slot)

    def _exchange_heads(self, step_send: StepSend, tensors: Sequence[torch.Tensor]) -> None:
        """Receives the group's heads of this rank's share of units."""
        mapping, plane_units, offsets = step_send.mapping, step_send.plane_units, step_send.unit_offsets
        section = plane_units * mapping.source_bytes
        per_rank = section * len(tensors)
        try:
            ops.gather_units(
                tensors, offsets, mapping.source_bytes, plane_units, self._send_buffer, 0, section, per_rank
            )
        finally:  # the other ranks wait for the collective even if this rank's part has failed
            num_bytes = per_rank * mapping.ratio
            if self._exchanged[0].numel() != num_bytes:
                self._exchanged = (self._receive_buffer[:num_bytes], self._send_buffer[:num_bytes])
            self._groups[mapping.ranks].run(partial(self._device.all_to_all, *self._exchanged))

    def _arrange(self, step_send: StepSend, tensors: Sequence[torch.Tensor], slot: Slot) -> None:
        """Fills `slot` with units as decode keeps them: exchanged heads side by side, and heads divided into planes."""
        mapping, offsets = step_send.mapping, step_send.unit_offsets
        out, at = self.ring.buffer, slot.offset
        if mapping.ranks:
            # Tensors follow each other on both sides, so interleaving takes them as one run of entries.
            entries = len(tensors) * step_send.plane_units * mapping.entries
            received = (self._receive_buffer, 0, entries * mapping.source_row)
            side_by_side = (mapping.ratio, entries, mapping.source_row)
            if mapping.planes == 1:
                ops.interleave_heads(*received, out, at, *side_by_side)
                return
            ops.interleave_heads(*received, self._send_buffer, 0, *side_by_side)
            tensors, offsets = self._exchanged[1].view(len(tensors), -1).unbind(), step_send.plane_offsets
        assert offsets is not None
        strides = (step_send.tensor_bytes, step_send.plane_bytes)
        ops.split_heads(tensors, offsets, mapping.planes, mapping.entries, mapping.plane_row, out, at, *strides)

    def _pack(self, push: LayerPush, tensors: Sequence[torch.Tensor], slot: Slot) -> None:
        """Fills `slot` with the units of tensors in the form in which decode keeps them. Runs on the side stream."""
        step_send = push.step_send
        mapping, offsets = step_send.mapping, step_send.unit_offsets
        assert offsets is not None
        units, num_bytes = len(offsets), len(offsets) * mapping.source_bytes
        gathered = self._send_buffer[:num_bytes]
        for n, (described, tensor) in enumerate(zip(push.tensors, tensors, strict=True)):
            to = self._send_buffer, 0, num_bytes, num_bytes
            ops.gather_units([tensor], offsets, mapping.source_bytes, units, *to)
            quantize = self._rank.caches.quantize.get((described.layer, described.part))
            blocks = packed(gathered, tensor, mapping.entries, quantize)
            out = self.ring.buffer[slot.offset + n * step_send.tensor_bytes :][: step_send.tensor_bytes]
            out.view(blocks.shape).copy_(blocks)

    def _acquire(self, step_send: StepSend) -> tuple[Slot, float]:
        """Returns a slot, and the seconds that it waited for one. Raises TimeoutError.

        Layers that wait for a grant keep their slots. If they have all slots, regrouping stops, and with it the model.
        So another layer waits `_grant_wait_s` at most for grants. If no slot becomes free, the layers that wait for one
        fail and give up their slots. From then on, those for the same decode engine do so at once, until it grants one.
        """
        if self._engines_without_grant and not step_send.waits_for_grant:
            self._engines_without_grant.discard(step_send.decode_engine)
        if (slot := self.ring.take(step_send)) is not None:
            return slot, 0.0
        if step_send.has_failed:  # nobody needs what the slot would hold
            raise TimeoutError("no staging slot is free for a layer whose requests have failed")
        began = time.monotonic()
        try:
            waiting = {holder.decode_engine for holder in self.ring.holders if holder.waits_for_grant}
            if not waiting & self._engines_without_grant:
                with suppress(TimeoutError):
                    return self.ring.acquire(step_send, self._grant_wait_s), time.monotonic() - began
            reason = "no grant came while all staging slots were taken: other requests need them"
            for holder in self.ring.holders:
                if holder.waits_for_grant:
                    self._engines_without_grant.add(holder.decode_engine)
                    holder.give_up_ungranted(reason)
            return self.ring.acquire(step_send, self._slot_timeout_s), time.monotonic() - began
        except TimeoutError:
            self._rank.observer.on(PushDelayed(time.monotonic() - began))
            raise


def _slot_waits_s(rank: PrefillRank) -> tuple[float, float]:
    """Returns how long a layer without a slot waits while holders of slots wait for grants, and then for a slot, which
    may rest after a failed write."""
    return rank.config.control_timeout_s, rank.config.write_timeout_s + rank.engine.limits.rest_s


def warn_of_slot_waits(rank: PrefillRank) -> None:
    """Warns if a rank may wait longer for a slot than the others, which have begun, wait in the all-to-all for it."""
    longest_s = sum(_slot_waits_s(rank))
    if rank.config.collective_timeout_s < longest_s:
        logger.warning(
            "collective_timeout_s is %g, and a rank may wait %g s for a staging slot while others exchange already: "
            "after that this engine must be restarted. Raise it, or lower write_timeout_s",
            rank.config.collective_timeout_s,
            longest_s,
        )


def make_regrouper(rank: PrefillRank, step_tokens: int) -> Regrouper | None:
    """Returns the regrouper; None if this engine's layout never needs one.

    The answer is the same on all ranks: it depends on the model, the layout and the parallel sizes alone.
    """
    description, info = rank.caches.description, rank.info
    size, slots = slot_bytes(description, step_tokens), rank.config.slots(step_tokens)
    if size == 0:
        return None
    buffer = rank.device.allocate(size * slots)
    if not buffer.is_cpu:
        ops_fallback.warn_once()
    rank.engine.register([(buffer.data_ptr(), buffer.numel())])
    movable = regroupable(description.geometries)
    wanted = sorted({ranks for g in movable for ranks in topology.regroup_groups(info.sharding, g.total_heads)})
    # All ranks of the world must create the groups of every pipeline stage, in the same order. vLLM numbers the world
    # with tensor-parallel ranks running fastest, then prefill-context-parallel ones.
    stage, world = len(info.stage_ranks), torch.distributed.get_world_size() if wanted else 0
    everywhere = [tuple(first + each for each in ranks) for first in range(0, world, stage) for ranks in wanted]
    if everywhere:
        warn_of_slot_waits(rank)
    groups = rank.device.new_groups(everywhere, rank.config.collective_timeout_s)
    mine = {
        ranks: ExchangeGroup(ranks, groups[tuple(info.stage_ranks[each] for each in ranks)])
        for ranks in wanted
        if info.rank in ranks
    }
    return Regrouper(rank, StagingRing(buffer, size, slots, rank.running_time), mine)
