# SPDX-License-Identifier: Apache-2.0
"""Writes layers to a decode engine, as planned. Read `LayerExecutor.execute` from top to bottom.

A sender's thread owns its executor. The control thread hands it the decode engine's layout before it lets any transfer
know where to write.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import RunningTime
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.device.base import DeviceError
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout, LayerTarget
from vllm_ascend_pd.prefill.layer_push import LayerPush
from vllm_ascend_pd.prefill.lease_check import LeaseCheck
from vllm_ascend_pd.prefill.pipeline import Pipeline
from vllm_ascend_pd.prefill.staging import StagingRing
from vllm_ascend_pd.prefill.step_transfer import StepTransfer
from vllm_ascend_pd.prefill.write_plan import WritePlan, batches_of
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

logger = logging.getLogger(__name__)

# Pause before a request's own write is tried for the last time.
_RETRY_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Write:
    """One write of a layer to one decode rank."""

    push: LayerPush
    target: LayerTarget
    plan: WritePlan
    # Indices of the requests that it is for.
    live: Sequence[int]
    # When it began, on the monotonic clock.
    begun: float


class LayerExecutor:
    """Writes layers to one decode engine: one write for each decode rank and all requests. If that fails, one write for
    each request, so that only those at fault fail."""

    def __init__(
        self,
        engine: TransferEngine,
        ring: StagingRing[StepTransfer] | None,
        running_time: RunningTime,
        observer: PrefillObserver,
        ready_timeout_s: float,
    ) -> None:
        """`ready_timeout_s`: how long a layer's bytes may take until they can be read."""
        self._engine = engine
        self._pipeline = Pipeline(engine)
        self._ring = ring
        self._running_time = running_time
        self._observer = observer
        self._ready_timeout_s = ready_timeout_s
        # The control thread sets it before any transfer's destinations; this thread reads it after those.
        self._layout: DecodeLayout | None = None

    def engine_described(self, layout: DecodeLayout) -> None:
        """Sets the engine's layout, which never changes. The control thread calls it before each transfer learns its
        destinations."""
        self._layout = layout

    @owned
    def execute(self, push: LayerPush) -> None:
        """Begins the writes of one layer. An error fails the requests that it concerns, and is not raised."""
        try:
            self._await_bytes(push)
            # Earlier writes end first, so that their requests need not wait for these requests' grants.
            push.writes.await_destinations(before_waiting=self._pipeline.drain)
            if self._layout is None:  # all of its requests have failed
                push.step_transfer.fail("the decode engine is not known", PushFailure.INTERNAL)
                return
            for target in self._layout.targets(push.tensors, push.step_transfer.route):
                self._pipeline.make_room()  # a request that fails meanwhile is not written
                plan = push.writes.plan_for(target, self._engine.limits)  # the grant may still be in flight
                live: Sequence[int] = range(len(plan.transfers))
                lease, batches = plan.lease, plan.batches
                if not lease.may_plan():
                    self._pipeline.drain()
                    live = [i for i in live if plan.transfers[i].await_grant(target.key)]
                    if not live:
                        continue
                    lease = LeaseCheck([plan.transfers[i] for i in live], target.key)
                    if len(live) < len(plan.transfers):
                        batches = batches_of(push.step_transfer, target.shape, self._engine.limits, live)
                write = _Write(push, target, plan, live, begun=time.monotonic())
                push.begun = push.begun or write.begun
                with_addresses = batches.at(push.sources(target), target.bases)
                # The lease is checked before each batch, since it may end in between (R2).
                self._pipeline.write(target.session, with_addresses, lease.may_begin, partial(self._written, write))
        except Exception as error:  # noqa: BLE001 - the layer's requests report it
            _fail(push, error)
        finally:
            self._pipeline.then(partial(self._end, push))

    @owned
    def then(self, call: Callable[[], None]) -> None:
        """Calls `call` once all writes that have begun are over."""
        self._pipeline.then(call)

    @owned
    def drain(self) -> None:
        """Waits until no write is in flight."""
        self._pipeline.drain()

    @property
    def is_idle(self) -> bool:
        """Whether no write is in flight."""
        return self._pipeline.is_empty

    def _await_bytes(self, push: LayerPush) -> None:
        """Waits until the layer's bytes can be read. Raises DeviceError or TimeoutError."""
        waited_s = 0.0
        try:
            push.ready.wait(0.0)
        except TimeoutError:
            self._pipeline.drain()
            deadline = time.monotonic() + self._ready_timeout_s
            if push.staged is not None:
                with contextlib.suppress(DeviceError, TimeoutError):  # `ready` fails with the same error below
                    push.staged.computed.wait(self._ready_timeout_s)
            computed_at = time.monotonic()
            push.ready.wait(max(0.0, deadline - computed_at))
            waited_s = time.monotonic() - computed_at
        if push.staged is not None:
            self._observer.regroup_waited(waited_s)

    def _written(self, write: _Write, error: TransferError | None) -> None:
        """Counts a write that is over. After an error, writes each of its requests by itself."""
        try:
            delivered = write.live if error is None else self._write_apart(write, error)
            plan = write.plan
            write.push.writes.arrived(plan, delivered)
            ticket_ids, num_bytes, total = write.push.step_transfer.ticket_ids, plan.num_bytes, plan.total_bytes
            if len(delivered) < len(plan.transfers):
                ticket_ids, num_bytes = [ticket_ids[i] for i in delivered], num_bytes[list(delivered)]
                total = int(num_bytes.sum())
            self._observer.write_ended(write.push.layer, plan.key, write.begun, ticket_ids, num_bytes, total)
        except Exception as unexpected:  # noqa: BLE001 - the layer's requests report it
            _fail(write.push, unexpected)

    def _end(self, push: LayerPush) -> None:
        """Gives the layer's staging slot back, after all its writes are over."""
        push.writes.layer_ended()
        if push.begun:
            self._observer.layer_written(time.monotonic() - push.begun)
        if push.staged is not None and (slot := push.staged.take_back()) is not None:
            assert self._ring is not None
            self._ring.release(slot, push.settled_at)

    # After a write for all requests has failed.

    def _write_apart(self, write: _Write, error: TransferError) -> list[int]:
        """Writes once for each request that has not failed and whose lease runs. Returns those that were delivered."""
        push, key = write.push, write.plan.key
        self._mark_in_flight(write, write.live, error)
        logger.warning("layer %s to decode rank %s: %s; trying each request by itself", push.layer, key, error)
        delivered = []
        for i in write.live:
            transfer = write.plan.transfers[i]
            if not transfer.await_grant(key):
                continue
            self._observer.write_retried()
            try:
                self._write_twice(write, i)
            except TransferError as final:
                self._mark_in_flight(write, (i,), final)
                transfer.fail(f"writing to decode rank {key} failed: {final.reason}", PushFailure.WRITE)
            if transfer.failure is None:
                delivered.append(i)
        return delivered

    def _write_twice(self, write: _Write, request: int) -> None:
        """Writes one request. Tries a second time if the error is retryable. Raises TransferError."""
        transfer, target = write.plan.transfers[request], write.target
        lease = LeaseCheck([transfer], target.key)
        batches = batches_of(write.push.step_transfer, target.shape, self._engine.limits, (request,))

        def once() -> None:
            with_addresses = batches.at(write.push.sources(target), target.bases)
            self._engine.write_batches(target.session, with_addresses, lease.may_begin)

        try:
            once()
        except TransferError as error:
            if not error.retryable:
                raise
            self._mark_in_flight(write, (request,), error)
            time.sleep(_RETRY_PAUSE_S)
            if transfer.await_grant(target.key):
                self._observer.write_retried()
                once()

    def _mark_in_flight(self, write: _Write, requests: Sequence[int], error: TransferError) -> None:
        """Records that a failed write may still read its source and write to decode for a while."""
        if error.may_arrive:
            write.push.settled_at = self._running_time() + self._engine.limits.settle_s
            for i in requests:
                write.plan.transfers[i].mark_in_flight(write.push.settled_at)


def _fail(push: LayerPush, error: Exception) -> None:
    """Fails the layer's requests, so that the thread can go on with others."""
    if isinstance(error, DeviceError | TimeoutError):
        push.step_transfer.fail(f"layer {push.layer} could not be read: {error}", PushFailure.DEVICE)
    else:
        logger.error("pushing layer %s failed", push.layer, exc_info=error)
        push.step_transfer.fail(f"pushing layer {push.layer} failed: {error}", PushFailure.INTERNAL)
