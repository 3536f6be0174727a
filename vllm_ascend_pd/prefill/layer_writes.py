# SPDX-License-Identifier: Apache-2.0
"""Writes layers to one decode engine, as planned. Read `LayerExecutor.execute` from top to bottom.

A sender's thread owns its executor. The control thread hands it the decode engine's layout before it lets any transfer
know where to write.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import RunningTime
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.device.base import DeviceError
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout, LayerTarget
from vllm_ascend_pd.prefill.regroup import StagingRing
from vllm_ascend_pd.prefill.step_send import LayerPush, WritePlan, batches_of
from vllm_ascend_pd.prefill.transfer import LeaseCheck
from vllm_ascend_pd.transport.batches import Batch, Batches, TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, Flight, TransferError

logger = logging.getLogger(__name__)

Done = Callable[[TransferError | None], None]

_NOTHING: Batch = ((), (), [])


class _Entry(NamedTuple):
    """A step that runs when all steps before it are done."""

    # Whether `do` waits for a batch in flight. Otherwise it only runs a callback.
    is_flight: bool
    do: Callable[[], None]


class Pipeline:
    """Writes to one decode engine, in order, with at most `BATCHES_IN_FLIGHT` batches in flight.

    The next write begins before the last one has ended, so that the link does not idle.

    One thread calls it. Every call may block for as long as a batch may take (`TransferEngine`).
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        # The first entry, if there is one, is a flight. Callbacks behind it run as soon as it has ended.
        self._entries: deque[_Entry] = deque()
        # How many of the entries are flights.
        self._flights = 0

    @owned
    def write(self, session: str, batches: Iterable[Batch], may_begin: Callable[[], bool], done: Done) -> None:
        """Begins all `batches` (`TransferEngine.begin`), unless one fails.

        Calls `done` once none of them is in flight, with None or an error. Of several errors it gets the first one
        after which bytes may still arrive, or else the first one.
        """
        errors: list[TransferError] = []

        def call_done() -> None:
            done(next((e for e in errors if e.may_arrive), errors[0]) if errors else None)

        try:
            for batch in batches:
                self.make_room()
                # Release our own room before blocking for more, or two senders to one peer deadlock.
                while self._flights and not self._engine.has_room(session, batch):
                    self._end_first()
                if errors or not self._begin(session, batch, may_begin, errors):
                    break
        except Exception as error:
            # A callback of an earlier write raised it. This write's batches in flight must still be waited for.
            errors.append(_failure(session, error))
            self._entries.append(_Entry(False, call_done))
            raise
        self.then(call_done)

    def _begin(self, session: str, batch: Batch, may_begin: Callable[[], bool], errors: list[TransferError]) -> bool:
        try:
            flight = self._engine.begin(session, batch, may_begin)
        except Exception as error:  # noqa: BLE001 - as in `_land`
            errors.append(_failure(session, error))
            return False
        if flight is not None:
            self._flights += 1
            self._entries.append(_Entry(True, partial(self._land, flight, errors)))
        return True

    @owned
    def make_room(self) -> None:
        """Waits until a further batch may begin."""
        while self._flights >= BATCHES_IN_FLIGHT:
            self._end_first()

    @owned
    def then(self, call: Callable[[], None]) -> None:
        """Calls `call` once all writes before it are over."""
        if self._entries:
            self._entries.append(_Entry(False, call))  # the first one is a flight
        else:
            call()

    @owned
    def await_turn(self, session: str) -> None:
        """Waits until a batch to `session` may begin at once, but not for writes of others."""
        self.make_room()
        while self._flights and not self._engine.has_room(session, _NOTHING):
            self._end_first()

    @owned
    def drain(self) -> None:
        """Waits for all writes."""
        while self._entries:
            self._end_first()

    def _end_first(self) -> None:
        self._entries.popleft().do()
        self._call_back()

    def _call_back(self) -> None:
        """Runs the callbacks that no flight holds up any more."""
        while self._entries and not self._entries[0].is_flight:
            self._entries.popleft().do()

    def _land(self, flight: Flight, errors: list[TransferError]) -> None:
        self._flights -= 1
        try:
            flight.wait()
        except Exception as error:  # noqa: BLE001 - `done` gets it
            errors.append(_failure(flight.session, error))


def _failure(session: str, error: Exception) -> TransferError:
    """Returns `error` as a TransferError. An unexpected error may have left bytes in flight."""
    if isinstance(error, TransferError):
        return error
    logger.error("a write to %s failed", session, exc_info=error)
    return TransferError(session, repr(error), retryable=False, may_arrive=True)


def joined(
    batches: Batches, places: Sequence[tuple[Sequence[int], Sequence[int]]], limits: TransferLimits
) -> Iterator[Batch]:
    """Yields the batches of several layers, as few as `limits` allow.

    `places`: for each layer, the base addresses of its sources and destinations.
    """
    sources, destinations, num_bytes = array("q"), array("q"), 0
    lengths: list[int] = []
    for place in places:
        for src, dst, sizes in batches.at(*place):
            more = sum(sizes)
            if lengths and (len(lengths) + len(sizes) > limits.max_descriptors or num_bytes + more > limits.max_bytes):
                yield sources, destinations, lengths
                sources, destinations, lengths, num_bytes = array("q"), array("q"), [], 0
            sources.extend(src)
            destinations.extend(dst)
            lengths += sizes
            num_bytes += more
    yield sources, destinations, lengths


# Pause before a request's own write is tried for the last time.
_RETRY_PAUSE_S = 0.05


class _Write(NamedTuple):
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
        ring: StagingRing | None,
        running_time: RunningTime,
        observer: PrefillObserver,
        ready_timeout_s: float,
    ) -> None:
        """`ready_timeout_s`: how long a layer's bytes may take until they can be read."""
        self._engine = engine
        # Whoever waits for the writes before it, too, puts a callback there.
        self.pipeline = Pipeline(engine)
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
    def execute(self, push: LayerPush, take_alike: Callable[[], Sequence[LayerPush]] = tuple) -> None:
        """Begins the writes of a layer. An error fails the requests that it concerns, and is not raised.

        take_alike: called when the layer's turn has come. Returns layers that came meanwhile and leave with this one:
            those that `can_join` allows.
        """
        pushes = [push]
        try:
            self._await_bytes(push)
            # Earlier writes end first, so that their requests need not wait for these requests' grants.
            push.step_send.await_destinations(before_waiting=self.pipeline.drain)
            if self._layout is None:  # all of its requests have failed
                push.step_send.fail("the decode engine is not known", PushFailure.INTERNAL)
                return
            of_layers = [self._layout.targets(push.tensors, push.step_send.route)]
            for target in of_layers[0][:1]:
                self.pipeline.await_turn(target.session)
            pushes += take_alike()
            for other in pushes[1:]:
                self._await_bytes(other)
                of_layers.append(self._layout.targets(other.tensors, other.step_send.route))
            for targets in zip(*of_layers, strict=True):
                self._write(pushes, targets)
        except Exception as error:  # noqa: BLE001 - the layers' requests report it
            for push in pushes:
                _fail(push, error)
        finally:
            for push in pushes:
                self.pipeline.then(partial(self._end, push))

    def can_join(self, push: LayerPush, other: LayerPush) -> bool:
        """Whether `other`, which was put after `push`, may leave with it: it can be read, and its writes are alike."""
        if other.step_send is not push.step_send or self._layout is None or not other.ready.is_done():
            return False
        route = push.step_send.route
        ours, theirs = (self._layout.targets(each.tensors, route) for each in (push, other))
        return [(t.key, t.shape) for t in ours] == [(t.key, t.shape) for t in theirs]

    def _write(self, pushes: Sequence[LayerPush], targets: Sequence[LayerTarget]) -> None:
        """Begins to write layers to one decode rank. `targets`: of each layer, all of one shape."""
        target, limits = targets[0], self._engine.limits
        self.pipeline.make_room()  # a request that fails meanwhile is not written
        step_send = pushes[0].step_send
        plan = step_send.plan_for(target.shape, limits)  # the grant may still be in flight
        if plan.total_bytes == 0:  # other ranks write all units that are exchanged
            return
        transfers = step_send.transfers
        live: Sequence[int] = range(len(transfers))
        lease, batches = step_send.lease_for(target.key), plan.batches
        if not lease.may_plan():
            self.pipeline.drain()
            live = [i for i in live if transfers[i].await_grant(target.key)]
            if not live:
                return
            lease = LeaseCheck([transfers[i] for i in live], target.key)
            if len(live) < len(transfers):
                batches = batches_of(step_send, target.shape, limits, live)
        begun = time.monotonic()
        writes = [_Write(push, to, plan, live, begun) for push, to in zip(pushes, targets, strict=True)]
        for push in pushes:
            push.begun = push.begun or begun
        places = [(push.sources(to), to.bases) for push, to in zip(pushes, targets, strict=True)]
        with_addresses = batches.at(*places[0]) if len(places) == 1 else joined(batches, places, limits)
        # The lease is checked before each batch, since it may end in between (R2).
        self.pipeline.write(target.session, with_addresses, lease.may_begin, partial(self._ended, writes))

    def _await_bytes(self, push: LayerPush) -> None:
        """Waits until the layer's bytes can be read. Raises DeviceError or TimeoutError."""
        waited_s = 0.0
        try:
            push.ready.wait(0.0)
        except TimeoutError:
            self.pipeline.drain()
            deadline = time.monotonic() + self._ready_timeout_s
            if push.step_send.route.is_staged:
                with contextlib.suppress(DeviceError, TimeoutError):  # `ready` fails with the same error below
                    push.computed.wait(self._ready_timeout_s)
            computed_at = time.monotonic()
            push.ready.wait(max(0.0, deadline - computed_at))
            waited_s = time.monotonic() - computed_at
        if push.step_send.route.is_staged:
            self._observer.regroup_waited(waited_s)

    def _ended(self, writes: Sequence[_Write], error: TransferError | None) -> None:
        """Counts layers whose write is over. After an error, writes each of their requests by itself."""
        for write in writes:
            push, plan, key = write.push, write.plan, write.target.key
            try:
                delivered = write.live if error is None else self._write_apart(write, error)
                push.step_send.arrived(key, plan, delivered)
                ticket_ids, num_bytes, total = push.step_send.ticket_ids, plan.num_bytes, plan.total_bytes
                if len(delivered) < len(ticket_ids):
                    ticket_ids, num_bytes = [ticket_ids[i] for i in delivered], num_bytes[list(delivered)]
                    total = int(num_bytes.sum())
                self._observer.write_ended(push.layer, key, write.begun, ticket_ids, num_bytes, total)
            except Exception as unexpected:  # noqa: BLE001 - the layer's requests report it
                _fail(push, unexpected)

    def _end(self, push: LayerPush) -> None:
        """Gives the layer's staging slot and its room in the queue back, after all its writes are over."""
        push.step_send.layer_ended()
        if push.begun:
            self._observer.layer_written(time.monotonic() - push.begun)
        if push.step_send.route.is_staged and (slot := push.take_back()) is not None:
            assert self._ring is not None
            self._ring.release(slot, push.settled_at)
        if push.room is not None:
            push.room.put(None)
        if push.over is not None:
            push.over.set()

    # After a write for all requests has failed.

    def _write_apart(self, write: _Write, error: TransferError) -> list[int]:
        """Writes once for each request that has not failed and whose lease runs. Returns those that were delivered."""
        push, key = write.push, write.target.key
        self._mark_in_flight(write, write.live, error)
        logger.warning("layer %s to decode rank %s: %s; trying each request by itself", push.layer, key, error)
        delivered = []
        for i in write.live:
            transfer = push.step_send.transfers[i]
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
        transfer, target = write.push.step_send.transfers[request], write.target
        lease = LeaseCheck([transfer], target.key)
        batches = batches_of(write.push.step_send, target.shape, self._engine.limits, (request,))

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
                write.push.step_send.transfers[i].mark_in_flight(write.push.settled_at)


def _fail(push: LayerPush, error: Exception) -> None:
    """Fails the layer's requests, so that the thread can go on with others."""
    if isinstance(error, DeviceError | TimeoutError):
        push.step_send.fail(f"layer {push.layer} could not be read: {error}", PushFailure.DEVICE)
    else:
        logger.error("pushing layer %s failed", push.layer, exc_info=error)
        push.step_send.fail(f"pushing layer {push.layer} failed: {error}", PushFailure.INTERNAL)
