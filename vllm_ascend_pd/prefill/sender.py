# SPDX-License-Identifier: Apache-2.0
"""The thread that writes to one decode engine: layer by layer, one write per decode rank for all requests.

Tasks run in the order they were put, and end in it: when a transfer's `Finish` comes up, all its writes are over.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_ascend_pd.core import stats
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.layout import CacheTensor
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.device.base import DeviceError, Event
from vllm_ascend_pd.observe.prefill import PrefillTrace
from vllm_ascend_pd.prefill.decode_layout import Course, DecodeLayout
from vllm_ascend_pd.prefill.grant_wait import GrantWaitLimit
from vllm_ascend_pd.prefill.pipeline import Pipeline
from vllm_ascend_pd.prefill.staging import LOOK_S, Slot, StagingRing
from vllm_ascend_pd.prefill.step_transfer import Chunk, Parcel, StepTransfer
from vllm_ascend_pd.prefill.transfer import Leave, Transfer
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

logger = logging.getLogger(__name__)

# Pause before a request's own write is tried for the last time.
_RETRY_PAUSE_S = 0.05


@dataclass(slots=True)
class LayerPush:
    """A chunk of a shipment, for the tensors of one layer that lie alike. `ready`: when the bytes can be read.

    Of one that is regrouped, `computed`: when that can begin; `slot`: where its bytes are once it is `ready`, each
    tensor's `staged_bytes` after the last one's. Regrouping hands the slot over by `filled`, the sender takes it back
    by `end`, and either may come first."""

    layer: str
    shipment: StepTransfer
    chunk: Chunk
    tensors: Sequence[CacheTensor]
    ready: Event
    computed: Event | None = None
    slot: Slot | None = None
    staged_bytes: int = 0
    begun: float = 0.0  # its first write
    settled_at: float = 0.0  # after a failed write: until then the slot may still be read
    has_room: bool = False  # counts against the queue's bound
    _over: bool = False
    _handing: threading.Lock = field(default_factory=threading.Lock)

    def filled(self, slot: Slot) -> bool:
        """Its bytes are there now. False: it was given up, and the slot stays the caller's."""
        with self._handing:
            if not self._over:
                self.slot = slot
            return not self._over

    def end(self) -> Slot | None:
        """Nothing of it will be read any more. The slot is the caller's, if it has one."""
        with self._handing:
            self._over = True
            return self.slot

    def bases(self, course: Course) -> list[int]:
        """The addresses that offsets of each part count from."""
        if self.slot is None:
            return [self.tensors[n].base for n in course.sources]
        return [self.slot.address + n * self.staged_bytes for n in course.sources]

    def fail(self, reason: str, cause: PushFailure) -> None:
        for item in self.shipment.items:
            item.transfer.fail(reason, cause)


@dataclass(frozen=True)
class Finish:
    """Nothing more will be put for these transfers."""

    transfers: Sequence[Transfer]


@dataclass(frozen=True)
class Barrier:
    """Set once everything put before it was dealt with."""

    passed: threading.Event


Task = LayerPush | Finish | Barrier


class Sender:
    """`layout` is set by the owner when the decode engine has described itself; transfers know to wait for it.
    `finished(transfers)` is called on this thread once their writes are over."""

    layout: DecodeLayout | None = None
    broken: Exception | None = None
    """What ended the thread: a bug, of which there is no owner but the engine as a whole."""
    _closing = False

    def __init__(
        self,
        name: str,
        engine: TransferEngine,
        ring: StagingRing[StepTransfer] | None,
        finished: Callable[[Sequence[Transfer]], None],
        running_time: RunningTime,
        measured: stats.Stats,
        trace: PrefillTrace,
        *,
        queue_size: int,
        ready_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._pipeline = Pipeline(engine)
        self._ring = ring
        self._finished = finished
        self._running_time = running_time
        self._stats = measured
        self._trace = trace
        self._ready_timeout_s = ready_timeout_s
        self.patience = GrantWaitLimit()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # Bounds the layers that wait, a token each; the other tasks are bounded by the number of transfers. As a
        # semaphore, whose methods are Python and run for every layer on the model's thread, too.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(queue_size):
            self._room.put(None)
        self._thread = threading.Thread(target=self._run_owned, name=name, daemon=True)
        self._thread.start()

    def put_layer(self, push: LayerPush, timeout_s: float) -> None:
        """Waits for room at most `timeout_s`; then the push's transfers fail. It is queued all the same: what it
        holds must be released when it is ready, and other ranks count on its regrouping."""
        try:
            self._room.get_nowait()
            push.has_room = True
        except queue.Empty:
            self._await_room(push, timeout_s)
        self._tasks.put(push)

    def _await_room(self, push: LayerPush, timeout_s: float) -> None:
        failed = all(transfer.failure is not None for transfer in push.shipment.transfers)
        try:
            self._room.get(timeout=0.0 if failed else timeout_s)
            push.has_room = True
        except queue.Empty:
            reason = f"the push queue stayed full for {timeout_s} s: the link does not keep up"
            push.fail(reason, PushFailure.QUEUE_FULL)

    def put(self, task: Finish | Barrier) -> None:
        self._tasks.put(task)

    @property
    def queued(self) -> int:
        """Tasks that have not begun."""
        return self._tasks.qsize()

    def retire(self) -> None:
        """Nothing more will be put: ends by itself when all that was is done with, staging slots included."""
        self._tasks.put(None)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Stops after the tasks at hand; what is still queued is dropped."""
        self._closing = True
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run_owned(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("%s ends", threading.current_thread().name)
            self.broken = error

    def _run(self) -> None:
        retired = False
        while not self._closing and not (retired and not self._slots_rest()):
            try:
                task = self._next()
            except queue.Empty:
                continue
            if task is None:
                retired = True
            elif isinstance(task, LayerPush):
                self._push(task)
            elif isinstance(task, Finish):
                self._pipeline.then(partial(self._finished, task.transfers))
            elif isinstance(task, Barrier):
                self._pipeline.then(task.passed.set)
        self._pipeline.drain()

    def _next(self) -> Task | None:
        """Raises queue.Empty while nothing is to do but to look at slots that rest."""
        if not self._pipeline.is_empty:
            with contextlib.suppress(queue.Empty):
                return self._tasks.get_nowait()
            self._pipeline.drain()
        return self._tasks.get(timeout=LOOK_S if self._slots_rest() else None)

    def _slots_rest(self) -> bool:
        return self._ring is not None and self._ring.rests()

    def _push(self, task: LayerPush) -> None:
        try:
            self._begin(task)
        except Exception as error:  # noqa: BLE001 - told to those it belongs to
            _fail(task, error)
        self._pipeline.then(partial(self._end, task))

    def _end(self, task: LayerPush) -> None:
        """No write of it is under way."""
        task.shipment.push_ended()
        if task.begun:
            self._stats.observe(stats.LAYER_PUSH_SECONDS, time.monotonic() - task.begun)
        if (slot := task.end()) is not None:
            assert self._ring is not None
            self._ring.release(slot, task.settled_at)
        if task.has_room:
            self._room.put(None)

    def _begin(self, task: LayerPush) -> None:
        self._await_bytes(task)
        shipment = task.shipment
        if not shipment.located:
            self._pipeline.drain()  # nobody shall wait for others' grants to learn how earlier writes have ended
            for item in shipment.items:
                item.transfer.await_destinations()
            shipment.located = True
        if self.layout is None:  # then every transfer has failed above
            task.fail("the decode engine is not known", PushFailure.INTERNAL)
            return
        for course in self.layout.courses(task.tensors, shipment.route):
            self._pipeline.make_room()  # who has failed by then is not written
            parcel = shipment.parcel(task.chunk, course, self._engine.limits)  # perhaps while the grant is under way
            # Once all are granted and none has failed, no lock is taken.
            leave = parcel.leave
            live: Sequence[int] = range(len(shipment.items))
            if not leave.is_plain():
                self._pipeline.drain()
                live = [i for i in live if shipment.transfers[i].await_grant(course.key)]
                leave = Leave([shipment.transfers[i] for i in live], course.key)
            if live:
                self._write_fused(task, course, parcel, leave, live)

    def _await_bytes(self, task: LayerPush) -> None:
        waited_s = 0.0
        try:
            task.ready.wait(0.0)
        except TimeoutError:
            waited_s = self._wait_for_bytes(task)
        if task.computed is not None:
            self._stats.observe(stats.REGROUP_WAIT_SECONDS, waited_s)

    def _wait_for_bytes(self, task: LayerPush) -> float:
        """Returns for how many seconds they were not there though their layer was computed."""
        self._pipeline.drain()
        deadline = time.monotonic() + self._ready_timeout_s
        if task.computed is not None:
            with contextlib.suppress(DeviceError, TimeoutError):  # which end `ready` too, and count there
                task.computed.wait(self._ready_timeout_s)
        computed_at = time.monotonic()
        task.ready.wait(max(0.0, deadline - computed_at))
        return time.monotonic() - computed_at

    def _write_fused(self, task: LayerPush, course: Course, parcel: Parcel, leave: Leave, live: Sequence[int]) -> None:
        """Begins one write for all live items."""
        begun = time.monotonic()
        task.begun = task.begun or begun
        batches = parcel.batches
        if len(live) < len(task.shipment.items):
            batches = task.shipment.batches(task.chunk, course.parts, frozenset(live), self._engine.limits)

        def done(error: TransferError | None) -> None:
            try:
                delivered = live if error is None else self._write_apart(task, course, live, error)
                self._count(task, parcel, delivered, begun)
            except Exception as unexpected:  # noqa: BLE001 - told to those it belongs to
                _fail(task, unexpected)

        # A lease that ran when the write was planned may have run out by the time a batch of it can begin (R2).
        self._pipeline.write(course.session, batches.at(task.bases(course), course.bases), leave.holds, done)

    def _write_apart(self, task: LayerPush, course: Course, live: Sequence[int], error: TransferError) -> list[int]:
        """One write for each item after one for all has failed, so that only those at fault suffer: none for those that
        have failed meanwhile, or whose lease has run out. Returns which have been delivered."""
        transfers = task.shipment.transfers
        self._unsettle(task, live, error)
        logger.warning("layer %s to decode rank %s: %s; trying each request by itself", task.layer, course.key, error)
        delivered = []
        for i in live:
            if not transfers[i].await_grant(course.key):
                continue
            self._stats.add(stats.WRITE_RETRIES)
            try:
                self._write_retrying(task, course, i)
            except TransferError as final:
                self._unsettle(task, live, final)
                transfers[i].fail(f"writing to decode rank {course.key} failed: {final.reason}", PushFailure.WRITE)
            if transfers[i].failure is None:
                delivered.append(i)
        return delivered

    def _count(self, task: LayerPush, parcel: Parcel, delivered: Sequence[int], begun: float) -> None:
        task.shipment.arrived(parcel, delivered)
        all_of_it = len(delivered) == len(task.shipment.items)
        self._stats.add(stats.PUSHED_BYTES, parcel.total if all_of_it else int(parcel.num_bytes[delivered].sum()))
        self._trace.pushed(task, parcel.key, begun, parcel.num_bytes, delivered)

    def _write_retrying(self, task: LayerPush, course: Course, item: int) -> None:
        transfer = task.shipment.transfers[item]
        leave = Leave([transfer], course.key)
        try:
            self._write_some(task, course, (item,), leave)
        except TransferError as error:
            if not error.retryable:
                raise
            self._unsettle(task, (item,), error)
            time.sleep(_RETRY_PAUSE_S)
            if transfer.await_grant(course.key):
                self._stats.add(stats.WRITE_RETRIES)
                self._write_some(task, course, (item,), leave)

    def _write_some(self, task: LayerPush, course: Course, only: Sequence[int], leave: Leave) -> None:
        batches = task.shipment.batches(task.chunk, course.parts, frozenset(only), self._engine.limits)
        self._engine.write_batches(course.session, batches.at(task.bases(course), course.bases), leave.holds)

    def _unsettle(self, task: LayerPush, items: Sequence[int], error: TransferError) -> None:
        """Bytes of a failed write may still leave from where they were read and arrive where they were sent."""
        if error.may_arrive:
            task.settled_at = self._running_time() + self._engine.limits.settle_s
            for i in items:
                task.shipment.transfers[i].unsettle(task.settled_at)


def _fail(task: LayerPush, error: Exception) -> None:
    """Whatever goes wrong ends in the requests it belongs to, and the thread lives on for the others."""
    if isinstance(error, DeviceError | TimeoutError):
        task.fail(f"layer {task.layer} could not be read: {error}", PushFailure.DEVICE)
    else:
        logger.error("pushing layer %s failed", task.layer, exc_info=error)
        task.fail(f"pushing layer {task.layer} failed: {error}", PushFailure.INTERNAL)
