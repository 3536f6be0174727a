# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: calls of the model's thread are done when they return, and the side stream is a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_store

from vllm_ascend_pd.device.base import Device, Group, aligned_buffer
from vllm_ascend_pd.device.event import DeviceError, Event

PAGE_BYTES = 4096


class CpuEvent(Event):
    """An event that is set once, with the error of the work that it ends, or None."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> None:
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the side stream did not finish this work within {timeout_s:g} s")
        if self._error is not None:
            raise DeviceError(f"work on the side stream failed: {self._error}") from self._error

    def is_done(self) -> bool:
        return self._done.is_set()


_REACHED = CpuEvent()
_REACHED.set()
"""The end of what the model's thread has called."""


class CpuDevice(Device):
    name = "cpu"
    transfer_protocol = "tcp"

    def __init__(self, queue_depth: int = 1024, timeout_s: float = 5.0) -> None:
        """Starts the side stream's thread.

        queue_depth: how much submitted work may wait.
        timeout_s: how long `submit` waits for room, and `close` for running work.
        """
        self._queue_depth = queue_depth
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], CpuEvent]] = deque()
        self._closed = False
        # A daemon: work that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="cpu-side-stream", daemon=True)
        self._thread.start()

    def record_event(self) -> Event:
        return _REACHED

    def submit(self, work: Callable[[], None], after: Event) -> Event:
        # Nothing to do about `after`: it is complete (record_event), or its work comes earlier in the queue.
        event = CpuEvent()
        with self._condition:
            has_room = self._condition.wait_for(
                lambda: self._closed or len(self._queue) < self._queue_depth, self._timeout_s
            )
            if self._closed:
                raise DeviceError("the device is closed")
            if not has_room:
                raise DeviceError(
                    f"{self._queue_depth} pieces of work wait on the side stream, none began in {self._timeout_s:g} s"
                )
            self._queue.append((work, event))
            self._condition.notify_all()
        return event

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host  # submitted work holds what it uses until it has run

    def allocate(self, nbytes: int) -> torch.Tensor:
        return aligned_buffer(nbytes, PAGE_BYTES, self.name)

    def new_groups(self, rank_lists: Sequence[tuple[int, ...]], timeout_s: float) -> dict[tuple[int, ...], Group]:
        """As in `Device`. The groups are not in torch's tables: whoever drops the last reference closes the
        connections."""
        dist.barrier()  # connecting has a deadline, and ranks may be here at different times
        rank, timeout = dist.get_rank(), timedelta(seconds=timeout_s)
        groups: dict[tuple[int, ...], Group] = {}
        for ranks in dict.fromkeys(rank_lists):
            if rank in ranks:
                store = dist.PrefixStore(f"vllm-ascend-pd/{ranks}", _get_default_store())
                try:
                    groups[ranks] = ProcessGroupGloo(store, ranks.index(rank), len(ranks), timeout)
                except RuntimeError as error:
                    raise DeviceError(f"ranks {ranks} did not connect: {error}") from error
        return groups

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, group: Group) -> None:
        group.alltoall_base(out, inp, [], []).wait()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            dropped = list(self._queue)
            self._queue.clear()
            self._condition.notify_all()
        for _, event in dropped:
            event.set(DeviceError("the device was closed before this work began"))
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeviceError(f"work on the side stream did not end within {self._timeout_s:g} s of closing")

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return
                work, event = self._queue.popleft()
                self._condition.notify_all()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - delivered by the event
                event.set(error)
            else:
                event.set()
            del work, event  # they hold tensors
