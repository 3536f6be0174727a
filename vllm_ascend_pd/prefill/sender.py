# SPDX-License-Identifier: Apache-2.0
"""A thread that writes to one decode engine. It runs tasks in the order in which they were put.

The model's thread puts layers. Any thread puts the end of transfers. The sender's own thread runs the tasks, and owns
the executor.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import RunningTime
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.layer_writes import LayerExecutor
from vllm_ascend_pd.prefill.regroup import LOOK_S, StagingRing
from vllm_ascend_pd.prefill.step_send import LayerPush
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport.engine import TransferEngine

logger = logging.getLogger(__name__)

_Task: TypeAlias = LayerPush | Callable[[], None]

# The most layers that leave together. Their staging slots become free together, too.
_MOST_JOINED = 8


class Sender:
    """Writes to one decode engine.

    Tasks end in the order in which they were put. So when the end of a transfer is handled, all its writes are over.
    The model's thread owns the method that queues layers.
    """

    def __init__(
        self,
        name: str,
        engine: TransferEngine,
        ring: StagingRing | None,
        finished: Callable[[Sequence[Transfer]], None],
        loaded: LoadedWeights,
        running_time: RunningTime,
        observer: PrefillObserver,
        *,
        queue_size: int,
        ready_timeout_s: float,
    ) -> None:
        """Starts the thread.

        finished: called when no write of these transfers follows.
        loaded: the model's weights.
        queue_size: how many layers may wait.
        ready_timeout_s: how long a layer's bytes may take until they can be read.
        """
        self._executor = LayerExecutor(engine, ring, running_time, observer, ready_timeout_s)
        self._pipeline = self._executor.pipeline
        self._ring = ring
        self._observer = observer
        self._finished = finished
        self._loaded = loaded
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        # The task that was taken to see whether it can leave with the layer before it.
        self._next: _Task | None = None
        # A token for each further layer that may wait. The number of transfers bounds the other tasks. Not a semaphore:
        # its methods are Python, and each layer would run them on the model's thread.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(queue_size):
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
    def put_layer(self, push: LayerPush, timeout_s: float) -> None:
        """Queues a layer. Its transfers fail if there is no room within `timeout_s`.

        Even then the layer is queued, because its staging slot must be released once it is filled.
        """
        try:
            self._room.get_nowait()
            push.room = self._room
        except queue.Empty:
            push.room = self._room if self._await_room(push, timeout_s) else None
        self._tasks.put(push)

    def _await_room(self, push: LayerPush, timeout_s: float) -> bool:
        began = time.monotonic()
        try:
            self._room.get(timeout=0.0 if push.step_send.has_failed else timeout_s)
        except queue.Empty:
            reason = f"the push queue stayed full for {timeout_s} s: the link does not keep up"
            push.step_send.fail(reason, PushFailure.QUEUE_FULL)
            return False
        finally:
            self._observer.backpressure(time.monotonic() - began)
        return True

    # On any thread.

    def finish(self, transfers: Sequence[Transfer]) -> None:
        """Queues the end of `transfers`, for which nothing more will be put. May be called any number of times."""
        self._tasks.put(partial(self._pipeline.then, partial(self._finish, transfers)))

    def barrier(self) -> threading.Event:
        """Returns an event that is set when all tasks that were put before are over."""
        passed = threading.Event()
        self._tasks.put(partial(self._pipeline.then, passed.set))
        return passed

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
        """See `LayerExecutor.engine_described`."""
        self._executor.engine_described(layout)

    def retire(self) -> None:
        """Lets the thread end after all queued tasks, when no staging slot rests. Nothing more may be put."""
        self._tasks.put(self._retire)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the current task, and drops the queued ones. Waits `timeout_s` at most."""
        self._closing = True
        self._tasks.put(self._retire)
        self._thread.join(timeout_s)

    # On its own thread.

    def _run(self) -> None:
        try:
            while not self._closing and not (self._retired and not self._slots_rest()):
                try:
                    task = self._next_task()
                except queue.Empty:
                    continue
                if isinstance(task, LayerPush):
                    self._executor.execute(task, partial(self._take_alike, task))
                else:
                    task()
            self._pipeline.drain()
        except Exception as error:
            logger.exception("%s ends", threading.current_thread().name)
            self._broken = error

    def _next_task(self) -> _Task:
        """Returns the next task. Raises queue.Empty from time to time while staging slots rest."""
        task, self._next = self._next, None
        if task is not None:
            return task
        if self._tasks.empty():
            self._pipeline.drain()
        return self._tasks.get(timeout=LOOK_S if self._slots_rest() else None)

    def _take_alike(self, push: LayerPush) -> list[LayerPush]:
        """Takes the layers that have come while `push` waited for its turn, and that leave with it."""
        layers: list[LayerPush] = []
        while self._next is None and len(layers) + 1 < _MOST_JOINED and not self._tasks.empty():
            task = self._tasks.get()
            if isinstance(task, LayerPush) and self._executor.can_join(push, task):
                layers.append(task)
            else:
                self._next = task
        return layers

    def _finish(self, transfers: Sequence[Transfer]) -> None:
        """Ends `transfers`, of which no write can follow."""
        written = [transfer for transfer in transfers if not transfer.is_written]
        now = self._loaded.current
        for transfer in written:
            # Decode was told of the weights that the transfer began with (R8). They change only between steps, and the
            # prompt's last layer has been computed by now.
            before = transfer.weights
            if before.version != now.version:
                names = f"from {before.fingerprint} to {now.fingerprint}"
                reason = f"prefill's weights were updated before all KV was sent, {names}"
                transfer.fail(reason, PushFailure.WEIGHTS)
            transfer.is_written = True
        if written:
            self._finished(written)

    def _retire(self) -> None:
        self._retired = True

    def _slots_rest(self) -> bool:
        return self._ring is not None and self._ring.rests()
