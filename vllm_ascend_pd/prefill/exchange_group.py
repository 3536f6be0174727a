# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange heads: one process group after another, for as long as the ranks live."""

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import torch.distributed as dist

from vllm_ascend_pd.core.generations import Generation, Membership, first_generation
from vllm_ascend_pd.device.base import Device, DeviceError, Group

logger = logging.getLogger(__name__)

# How often a rank looks whether another one has left the group: the others learn of it without a request's help. More
# often where connecting has less time: a new group's ranks begin with that when they see that it has opened.
_LOOK_S = 1.0
_KEY = "generation"


class ExchangeGroup:
    """`ranks`: in the default world; `named`: what errors call them. Where the device cannot connect ranks anew, a
    group that has failed stays so."""

    def __init__(
        self, device: Device, ranks: tuple[int, ...], named: str, group: Group, place: int, timeout_s: float
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._named = named
        self._timeout_s = timeout_s
        self._look_s = min(_LOOK_S, timeout_s / 4)
        self._group: Group | None = group  # of the generation `_connected`
        self._connected = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._state = Membership(place)
        self._asked = 0  # the step that the side stream has come to and waits with; 0: it does not
        self._trouble: Exception | None = None  # the thread's, last time
        self._busy_since = 0.0  # the store may hang for as long as the rank that serves it: it has no deadline
        self._closed = False
        self._thread: threading.Thread | None = None
        store = device.group_store(ranks)
        if store is not None:
            self._thread = threading.Thread(target=self._run, args=(store,), name=f"pd-regroup-{named}", daemon=True)
            self._thread.start()

    def run(self, step: int, collective: Callable[[Group], None]) -> None:
        """The next collective of `step`, on the side stream, in this process group; what it raises ends the group.
        Raises `DeviceError` when this collective runs on no rank, or not on this one."""
        generation, group = self._enter(step)
        try:
            collective(group)
        except BaseException as error:
            with self._changed:
                self._state.failed(generation, str(error))
                self._left()
            raise

    def missed(self, step: int, reason: str) -> None:
        """This rank does not run a collective of `step`. Its next one would meet the others' last one, and they would
        take each other's bytes for those of another layer or request (R5)."""
        with self._changed:
            self._state.miss(step, reason)
            self._left()

    @property
    def generation(self) -> int | None:
        """The generation in which collectives run here; None when this rank has left it, or not yet connected."""
        with self._changed:
            ready = self._state.failure is None and self._connected == self._state.generation
            return self._state.generation if ready and self._group is not None else None

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            if self._thread is not None:
                self._group = None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _left(self) -> None:
        """Called with the lock: a rank that has left says so by closing its connections."""
        if self._state.failure is not None:
            if self._thread is not None:  # HCCL's are for whoever created them all to destroy
                self._group = None
            self._changed.notify_all()

    def _enter(self, step: int) -> tuple[int, Group]:
        with self._lock:  # of every layer: a condition's own methods are Python
            answer = self._state.begin(step)
            if answer is None and self._thread is not None:
                self._await_agreement(step)
                answer = self._state.begin(step)
            if answer is None:  # the record could not be seen
                self._state.miss(step, f"torch's store does not answer: {self._trouble or 'too late'}")
            if answer and not self._is_connected():
                self._await_connection()
            if answer and self._is_connected():
                assert self._group is not None
                return self._state.generation, self._group
            reason = self._state.failure
            if answer:
                reason = reason or "its ranks did not connect again in time"
                self._state.miss(step, reason)
                self._left()
        again = "later ones will be served" if self._thread is not None else "restart the prefill engine"
        raise DeviceError(
            f"tensor-parallel ranks {self._named} have missed an all-to-all, and exchange nothing for this request; "
            f"{again}. Why: {reason or 'one of them has only just connected again'}"
        )

    def _is_connected(self) -> bool:
        return self._group is not None and self._connected == self._state.generation

    def _await_agreement(self, step: int) -> None:
        if self._busy_since and time.monotonic() - self._busy_since > self._timeout_s:
            return  # one wait for a store that hangs is enough
        self._asked = step
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._asked == 0 or self._closed, self._timeout_s)
        self._asked = 0

    def _await_connection(self) -> None:
        """Connecting takes the others, who are on their way here: it is a collective, and may take as long."""
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: self._is_connected() or self._state.failure is not None or self._closed, 2 * self._timeout_s
        )

    # On the group's own thread.

    def _run(self, store: dist.Store) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._look_s)
                if self._closed:
                    return
                step, self._busy_since = self._asked, time.monotonic()
            trouble: Exception | None = None
            try:
                self._agree(store, step)
                self._connect()
            except (DeviceError, RuntimeError) as error:  # torch's for whatever is wrong with a store
                trouble = error
                logger.warning("tensor-parallel ranks %s cannot connect again yet: %s", self._named, error)
            with self._changed:
                self._trouble, self._busy_since = trouble, 0.0
                if self._asked == step:
                    self._asked = 0
                self._changed.notify_all()
                if trouble is not None:
                    self._changed.wait_for(lambda: self._closed, self._look_s)

    def _has_work(self) -> bool:
        if self._closed or self._asked:
            return True
        if self._state.failure is not None:
            return self._state.promised == 0
        return not self._is_connected()

    def _agree(self, store: dist.Store, step: int) -> None:
        """Until nothing is left for this rank to write into the record."""
        seen = _swap(store, None, first_generation(len(self._ranks)))
        while True:
            with self._changed:
                wanted = self._state.see(seen, step)
                self._left()
                if wanted is None:
                    return
            seen = _swap(store, seen, wanted)

    def _connect(self) -> None:
        with self._changed:
            generation = self._state.generation
            if self._closed or self._state.failure is not None or self._is_connected():
                return
            self._group = None
        try:
            group = self._device.connect(self._ranks, generation, self._timeout_s)
        except DeviceError as error:
            with self._changed:
                self._state.failed(generation, str(error))
                self._left()
            raise
        with self._changed:
            if self._state.failure is None and self._state.generation == generation:
                self._group, self._connected = group, generation
                logger.warning("tensor-parallel ranks %s exchange KV again (generation %d)", self._named, generation)


def _swap(store: dist.Store, expected: Generation | None, wanted: Generation) -> Generation:
    """What the record is after it was to become `wanted` if it is `expected` (None: if there is none)."""
    before = "" if expected is None else msgspec.json.encode(expected).decode()
    now = store.compare_set(_KEY, before, msgspec.json.encode(wanted).decode())
    return msgspec.json.decode(now, type=Generation)
