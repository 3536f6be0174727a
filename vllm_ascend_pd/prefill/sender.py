# SPDX-License-Identifier: Apache-2.0
"""A thread that writes to one decode engine. Read `Sender._run` from top to bottom.

It takes layers and marks in the order in which they were put: the model's thread puts layers, any thread puts marks.
The control thread hands it the decode engine's layout before it lets any transfer know where to write.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.core.observer import LayerWritten, PushDelayed, RegroupAwaited, WriteEnded, WriteRetried
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout, LayerTarget
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import LOOK_S, StagingRing
from vllm_ascend_pd.prefill.step_send import LayerPush, StepSend
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport.batches import Batch, PagedWrite
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, Flight, TransferError

logger = logging.getLogger(__name__)

# The most layers that leave together. Their staging slots become free together, too.
_MOST_JOINED = 8
# Pause before a request's own write is tried for the last time.
_RETRY_PAUSE_S = 0.05

_NOTHING: Batch = ((), (), [])


@dataclass(slots=True)
class Mark:
    """A place in a sender's queue. It is reached when all writes of layers before it are over."""

    # Transfers of which no write follows.
    transfers: Sequence[Transfer] = ()
    reached: threading.Event = field(default_factory=lambda: threading.Event())


@dataclass(slots=True)
class _Write:
    """A write to one decode rank, of layers that leave together."""

    layers: Sequence[LayerPush]
    # Of each layer. All have equal portions.
    targets: Sequence[LayerTarget]
    paged: PagedWrite
    # The requests that it is for, as indices.
    live: Sequence[int]
    # On the monotonic clock.
    begun_at: float
    # Batches in flight, in order.
    flights: deque[Flight] = field(default_factory=deque)
    # Whether all batches have begun, unless one has failed.
    has_begun: bool = False
    errors: list[TransferError] = field(default_factory=list)

    @property
    def error(self) -> TransferError:
        """The first of its errors after which bytes may still arrive, or else the first one."""
        return next((e for e in self.errors if e.may_arrive), self.errors[0])


class Sender:
    """Writes layers to one decode engine: one write for each decode rank and all requests. If that fails, one write for
    each request, so that only those at fault fail.

    The next write begins before the last one has ended, so that the link does not idle. Layers and marks end in the
    order in which they were put. So when the end of a transfer is handled, all its writes are over. The model's thread
    owns the method that queues layers.
    """

    def __init__(
        self,
        name: str,
        rank: PrefillRank,
        ring: StagingRing | None,
        on_writing_ended: Callable[[Sequence[Transfer]], None],
    ) -> None:
        """Starts the thread. `on_writing_ended`: called when no write of these transfers follows."""
        self._rank = rank
        self._engine = rank.engine
        self._observer = rank.observer
        self._ring = ring
        self._on_writing_ended = on_writing_ended
        # How long a layer's bytes may take until they can be read.
        self._ready_timeout_s = rank.config.collective_timeout_s + rank.config.write_timeout_s
        # The control thread sets it before any transfer's destinations; this thread reads it after those.
        self._layout: DecodeLayout | None = None
        # None: nothing more follows.
        self._tasks: queue.SimpleQueue[LayerPush | Mark | None] = queue.SimpleQueue()
        # What was taken from it to see whether it can leave with the layer before.
        self._taken: deque[LayerPush | Mark | None] = deque()
        # What has begun and not ended, in order. Behind the writes of layers come the layers themselves. While a batch
        # is in flight, the first one is a write with such a batch.
        self._begun: deque[_Write | LayerPush | Mark] = deque()
        # How many batches of these writes are in flight.
        self._in_flight = 0
        # A token for each further layer that may wait. The number of transfers bounds the marks. Not a semaphore:
        # its methods are Python, and each layer would run them on the model's thread.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(rank.config.push_queue_size):
            self._room.put(None)
        # The bug that ended the thread. The sender's thread writes it, the model's thread reads it.
        self._broken: Exception | None = None
        # Whether no further task may begin. `close` sets it, the sender's thread reads it.
        self._closing = False
        # Whether no further task will be put. The sender's thread owns it.
        self._retired = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # On the model's thread.

    @owned
    def put_layer(self, push: LayerPush) -> None:
        """Queues a layer. Its transfers fail if there is no room within `write_timeout_s`.

        Even then the layer is queued, because its staging slot must be released once it is filled.
        """
        push.room, waited_s = self._room, 0.0
        try:
            self._room.get_nowait()
        except queue.Empty:
            began, timeout_s = time.monotonic(), self._rank.config.write_timeout_s
            try:
                self._room.get(timeout=0.0 if push.step_send.has_failed else timeout_s)
            except queue.Empty:
                push.room = None
                reason = f"the push queue stayed full for {timeout_s} s: the link does not keep up"
                push.step_send.fail(reason, PushFailure.QUEUE_FULL)
            waited_s = time.monotonic() - began
        self._tasks.put(push)
        if waited_s:
            self._observer.on(PushDelayed(waited_s))

    # On any thread.

    def finish(self, transfers: Sequence[Transfer]) -> None:
        """Queues the end of `transfers`, for which nothing more will be put. May be called any number of times."""
        self._tasks.put(Mark(transfers))

    def barrier(self) -> threading.Event:
        """Returns an event that is set when all tasks that were put before are over."""
        mark = Mark()
        self._tasks.put(mark)
        return mark.reached

    @property
    def queued(self) -> int:
        """Tasks that have not begun."""
        return self._tasks.qsize()

    @owned
    def check(self) -> None:
        """Raises RuntimeError if a bug has ended the thread. Otherwise its transfers would wait for ever."""
        if self._broken is not None:
            raise RuntimeError("a sender has ended by an error of its own") from self._broken

    def engine_described(self, layout: DecodeLayout) -> None:
        """Sets where the decode engine's caches lie, which never changes. The control thread calls it before each
        transfer learns its destinations."""
        self._layout = layout

    def retire(self) -> None:
        """Lets the thread end after all queued tasks, when no staging slot rests. Nothing more may be put."""
        self._tasks.put(None)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the current task, and drops the queued ones. Waits `timeout_s` at most."""
        self._closing = True
        self._tasks.put(None)
        self._thread.join(timeout_s)

    # On its own thread.

    def _run(self) -> None:
        """Takes a layer, waits for its bytes and for grants, and begins its writes; or takes a mark. Then ends what is
        over. Waits for the oldest batch in flight when another one must begin, or when nothing is queued."""
        try:
            while (task := self._take()) is not None:
                if isinstance(task, LayerPush):
                    self._write_layers(task)
                else:
                    self._begun.append(task)
                self._end_what_is_over()
            self._drain()
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Ends the thread after the current task, because of a bug."""
        logger.error("%s ends", threading.current_thread().name, exc_info=error)
        self._broken = error

    def _take(self) -> LayerPush | Mark | None:
        """Returns the next layer or mark. Returns None when the thread must end."""
        while not self._closing and self._broken is None:
            if not self._taken:
                if self._tasks.empty():
                    self._drain()
                rests = self._ring is not None and self._ring.free_rested()
                if self._retired and not rests:
                    break
                try:
                    self._taken.append(self._tasks.get(timeout=LOOK_S if rests else None))
                except queue.Empty:
                    continue
            if (task := self._taken.popleft()) is not None:
                return task
            self._retired = True
        return None

    # Layers.

    def _write_layers(self, layer: LayerPush) -> None:
        """Begins the writes of a layer, and of those that came while it waited for its turn and can leave with it.

        An error fails the requests that it concerns, and is not raised.
        """
        layers, step_send = [layer], layer.step_send
        try:
            self._await_bytes(layer)
            if (layout := self._await_layout(step_send)) is None:
                step_send.fail("the decode engine is not known", PushFailure.INTERNAL)  # no effect: all have failed
                return
            # First wait for room: layers that come meanwhile leave with this one.
            for target in layout.targets(layer.tensors, step_send.mapping)[:1]:
                self._await_turn(target.session)
            while len(layers) < _MOST_JOINED and (alike := self._take_alike(layer, layout)) is not None:
                layers.append(alike)
            for joined in layers[1:]:
                self._await_bytes(joined)
            of_layers = [layout.targets(each.tensors, step_send.mapping) for each in layers]
            for targets in zip(*of_layers, strict=True):
                self._write(layers, targets)
        except Exception as error:  # noqa: BLE001 - the layers' requests report it
            for each in layers:
                _fail(each, error)
        finally:
            self._begun.extend(layers)

    def _await_bytes(self, push: LayerPush) -> None:
        """Waits until the layer's bytes can be read. Raises DeviceError or TimeoutError."""
        waited_s = 0.0
        try:
            push.ready.wait(0.0)
        except TimeoutError:
            self._drain()
            deadline = time.monotonic() + self._ready_timeout_s
            if push.step_send.mapping.is_staged:
                with contextlib.suppress(DeviceError, TimeoutError):  # `ready` fails with the same error below
                    push.computed.wait(self._ready_timeout_s)
            computed_at = time.monotonic()
            push.ready.wait(max(0.0, deadline - computed_at))
            waited_s = time.monotonic() - computed_at
        if push.step_send.mapping.is_staged:
            self._observer.on(RegroupAwaited(waited_s))

    def _await_layout(self, step_send: StepSend) -> DecodeLayout | None:
        """Waits until it is known where to write. Returns None if all requests have failed before."""
        if not step_send.is_located:
            # Earlier writes end first: their requests need not wait for these requests' grants, and no KV that vLLM
            # took back arrives after what replaces it.
            self._drain()
            for transfer in step_send.transfers:
                transfer.state.await_write(None)
            step_send.is_located = True
        return self._layout

    def _take_alike(self, layer: LayerPush, layout: DecodeLayout) -> LayerPush | None:
        """Takes the next task if it is a layer whose bytes can be read and whose writes are like those of `layer`.
        Otherwise returns None, and it stays the next one."""
        if not self._taken and not self._tasks.empty():
            self._taken.append(self._tasks.get())
        task, step_send = self._taken[0] if self._taken else None, layer.step_send
        if not (isinstance(task, LayerPush) and task.step_send is step_send and task.ready.is_done()):
            return None
        ours, theirs = (layout.targets(each.tensors, step_send.mapping) for each in (layer, task))
        if [(t.key, t.portions_id) for t in ours] != [(t.key, t.portions_id) for t in theirs]:
            return None
        self._taken.popleft()
        return task

    def _write(self, layers: Sequence[LayerPush], targets: Sequence[LayerTarget]) -> None:
        """Begins to write layers to one decode rank. `targets`: of each layer, with equal portions."""
        key, session, limits = targets[0].key, targets[0].session, self._engine.limits
        self._await_turn(session)  # a request that fails meanwhile is not written
        step_send, target = layers[0].step_send, targets[0]
        paged = step_send.write_to(target, limits)  # the grant may still be in flight
        if paged.total_bytes == 0:  # other ranks write all units that are exchanged
            return
        live: Sequence[int] = range(len(step_send.transfers))
        if time.monotonic() >= (until := step_send.writable_until(key)):
            self._drain()
            live = [i for i in live if step_send.transfers[i].state.await_write(key)]
            if not live:
                return
            if len(live) < len(step_send.transfers):
                paged = step_send.write_of(live, target, limits)
        places = [(layer.sources(target), target.bases) for layer, target in zip(layers, targets, strict=True)]
        write = _Write(layers, targets, paged, live, begun_at=time.monotonic())
        for layer in layers:
            layer.begun = layer.begun or write.begun_at
        self._begun.append(write)

        def may_begin() -> bool:
            """The leases are checked right before each batch begins, since one may end in between (R2)."""
            return time.monotonic() < until or time.monotonic() < step_send.lease_until(key, live)

        try:
            for batch in paged.at(places):
                # Release our own room before blocking for more, or two senders to one peer deadlock.
                self._await_turn(session, batch)
                if write.errors:
                    break
                flight = self._engine.begin(session, batch, may_begin)
                if flight is not None:
                    write.flights.append(flight)
                    self._in_flight += 1
        except Exception as error:  # noqa: BLE001 - reported when the write's other batches are over
            write.errors.append(_failure(session, error))
        finally:
            write.has_begun = True
            self._end_what_is_over()

    # What is in flight.

    def _await_turn(self, session: str, batch: Batch = _NOTHING) -> None:
        """Waits until a batch to `session` may begin at once, but not for writes of others."""
        while self._in_flight >= BATCHES_IN_FLIGHT or (self._in_flight and not self._engine.has_room(session, batch)):
            self._settle_oldest()

    def _drain(self) -> None:
        """Waits for all writes."""
        while self._in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Waits for the batch that has been in flight for the longest time."""
        write = self._begun[0]
        assert isinstance(write, _Write)
        flight = write.flights.popleft()
        self._in_flight -= 1
        try:
            flight.wait()
        except Exception as error:  # noqa: BLE001 - reported when the write's other batches are over
            write.errors.append(_failure(flight.session, error))
        self._end_what_is_over()

    def _end_what_is_over(self) -> None:
        """Ends all that no batch in flight holds up any more, in order."""
        while self._begun:
            first = self._begun[0]
            if isinstance(first, _Write) and (first.flights or not first.has_begun):
                return
            match self._begun.popleft():
                case _Write() as write:
                    self._end_write(write)
                case LayerPush() as layer:
                    self._end_layer(layer)
                case Mark() as mark:
                    self._reach(mark)

    # What is over.

    def _end_write(self, write: _Write) -> None:
        """Counts a write that is over. After an error, writes each layer of each request by itself."""
        for push, target in zip(write.layers, write.targets, strict=True):
            try:
                delivered = self._write_apart(push, target, write) if write.errors else write.live
                num_bytes, ticket_ids = write.paged.num_bytes, push.step_send.ticket_ids
                push.step_send.count_delivered(target.key, num_bytes, delivered)
                if len(delivered) < len(ticket_ids):
                    num_bytes, ticket_ids = [num_bytes[i] for i in delivered], [ticket_ids[i] for i in delivered]
                self._observer.on(WriteEnded(push.layer, target.key, write.begun_at, ticket_ids, num_bytes))
            except Exception as unexpected:  # noqa: BLE001 - the layer's requests report it
                _fail(push, unexpected)

    def _end_layer(self, push: LayerPush) -> None:
        """Gives the layer's staging slot and its room in the queue back, after all its writes are over."""
        try:
            if push.begun:
                self._observer.on(LayerWritten(time.monotonic() - push.begun))
        except Exception as error:  # noqa: BLE001 - the layer's requests report it
            _fail(push, error)
        finally:
            if push.step_send.mapping.is_staged and (slot := push.take_staging_slot()) is not None:
                assert self._ring is not None
                self._ring.release(slot, push.settled_at)
            if push.room is not None:
                push.room.put(None)
            if push.over is not None:
                push.over.set()

    # After a write for all requests has failed.

    def _write_apart(self, push: LayerPush, target: LayerTarget, write: _Write) -> list[int]:
        """Writes once for each request that has not failed and whose lease runs. Returns those that were delivered.

        If the rank does not answer, no further request waits for it: this thread writes for others, too.
        """
        key, error, no_answer = target.key, write.error, ""
        self._delay_settling(push, write.live, error)
        logger.warning("layer %s to decode rank %s: %s; trying each request by itself", push.layer, key, error)
        delivered = []
        for i in write.live:
            transfer = push.step_send.transfers[i]
            if no_answer:
                transfer.state.fail(no_answer, PushFailure.WRITE)
                continue
            if not transfer.state.await_write(key):
                continue
            self._observer.on(WriteRetried())
            try:
                self._write_twice(push, target, i)
            except TransferError as final:
                self._delay_settling(push, (i,), final)
                reason = f"writing to decode rank {key} failed: {final.reason}"
                transfer.state.fail(reason, PushFailure.WRITE)
                no_answer = reason if final.no_answer else ""
            if transfer.state.failure is None:
                delivered.append(i)
        return delivered

    def _write_twice(self, push: LayerPush, target: LayerTarget, request: int) -> None:
        """Writes one request. Tries a second time if the error is retryable. Raises TransferError."""
        transfer = push.step_send.transfers[request]
        paged = push.step_send.write_of((request,), target, self._engine.limits)

        def once() -> None:
            with_addresses = paged.at([(push.sources(target), target.bases)])
            self._engine.write_batches(
                target.session, with_addresses, lambda: time.monotonic() < transfer.state.lease_until(target.key)
            )

        try:
            once()
        except TransferError as error:
            if not error.retryable:
                raise
            self._delay_settling(push, (request,), error)
            time.sleep(_RETRY_PAUSE_S)
            if transfer.state.await_write(target.key):
                self._observer.on(WriteRetried())
                once()

    def _delay_settling(self, push: LayerPush, requests: Sequence[int], error: TransferError) -> None:
        """Records that a failed write may still read its source and write to decode for a while."""
        if error.may_arrive:
            push.settled_at = self._rank.running_time() + self._engine.limits.settle_s
            for i in requests:
                push.step_send.transfers[i].state.delay_settling(push.settled_at)

    # The end.

    def _reach(self, mark: Mark) -> None:
        """Ends the mark's transfers, of which no write follows. An error ends the thread: they would wait for ever."""
        ended = [transfer for transfer in mark.transfers if not transfer.writing_ended]
        try:
            now = self._rank.loaded.current
            for transfer in ended:
                # Decode was told of the weights that the transfer began with (R8). They change only between steps, and
                # the prompt's last layer has been computed by now.
                before = transfer.weights
                if before.version != now.version:
                    names = f"from {before.fingerprint} to {now.fingerprint}"
                    reason = f"prefill's weights were updated before all KV was sent, {names}"
                    transfer.state.fail(reason, PushFailure.WEIGHTS)
                if transfer.again and transfer.state.settled_at > -math.inf:
                    reason = "what a failed write has left under way may be KV that vLLM took back"
                    transfer.state.fail(reason, PushFailure.WRITE)
                transfer.writing_ended = True
            if ended:
                self._on_writing_ended(ended)
        except Exception as error:  # noqa: BLE001 - `check` raises it; not that of the write that waits meanwhile
            self._break(error)
        mark.reached.set()


def _failure(session: str, error: Exception) -> TransferError:
    """Returns `error` as a TransferError. An unexpected error may have left bytes in flight."""
    if isinstance(error, TransferError):
        return error
    logger.error("a write to %s failed", session, exc_info=error)
    return TransferError(session, repr(error), retryable=False, may_arrive=True)


def _fail(push: LayerPush, error: Exception) -> None:
    """Fails the layer's requests, so that the thread can go on with others."""
    if isinstance(error, DeviceError | TimeoutError):
        push.step_send.fail(f"layer {push.layer} could not be read: {error}", PushFailure.DEVICE)
    else:
        logger.error("pushing layer %s failed", push.layer, exc_info=error)
        push.step_send.fail(f"pushing layer {push.layer} failed: {error}", PushFailure.INTERNAL)
