# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU as a device: torch_npu streams and events. Importable without torch_npu."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vllm_ascend_pd.core.ascend import hccl_config
from vllm_ascend_pd.device.base import Device, Group, aligned_buffer
from vllm_ascend_pd.device.event import DeviceError, Event

logger = logging.getLogger(__name__)

REGISTRATION_BYTES = 2 * 1024 * 1024
"""Memory registered for HCCS transfers begins and ends at a multiple of 2 MiB (Mooncake's Ascend transport)."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3
"""Between two looks at an event. Every look takes the GIL from the model's thread, so they become rarer: a wait may
take an eighth longer."""


class NpuEvent(Event):
    """A recorded `torch.npu.Event`, with the error that kept work from being queued before it, if any."""

    def __init__(self, device: NpuDevice, event: Any, error: Exception | None = None) -> None:
        self._device = device
        self.event = event
        self._error = error

    def wait(self, timeout_s: float) -> None:
        self._device.bind_thread()
        began = time.monotonic()
        while not self._reached():  # torch.npu.Event.synchronize has no timeout
            waited = time.monotonic() - began
            if waited >= timeout_s:
                raise TimeoutError(f"the NPU stream did not finish this work within {timeout_s:g} s")
            time.sleep(min(max(waited / 8, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
        if self._error is not None:
            raise DeviceError(f"work could not be queued on the side stream: {self._error}") from self._error

    def is_done(self) -> bool:
        self._device.bind_thread()
        try:
            return self._reached()
        except DeviceError:
            return True

    def _reached(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError as error:
            raise self._device.failed(error) from error


class NpuDevice(Device):
    name = "npu"
    transfer_protocol = "ascend"

    def __init__(self) -> None:
        """Uses the NPU that is current in the calling thread."""
        import torch_npu  # noqa: F401 - makes torch.npu

        self._index = torch.npu.current_device()
        self._side = torch.npu.Stream(device=self._index)
        self._model: Any = None  # the stream of the model's thread, when last seen
        self._threads = threading.local()
        self._threads.bound = True  # the caller's
        self._submitted: deque[tuple[NpuEvent, Callable[[], None]]] = deque()  # until its end is seen
        self._meetings = 0  # with the world's other ranks
        self._closed = False

    def failed(self, error: RuntimeError) -> DeviceError:
        """Returns the error to raise for one that torch_npu reports: CANN ends a stream in which work has failed."""
        failure = f"the NPU reported an error, and its stream runs nothing more (restart this engine): {error}"
        if self.failure is None:
            self.failure = failure
            logger.error("Restart this engine: %s", failure)
        return DeviceError(failure)

    def bind_thread(self) -> None:
        """Makes this NPU current in the calling thread: a new thread has none, or number 0."""
        if not getattr(self._threads, "bound", False):
            torch.npu.set_device(self._index)
            self._threads.bound = True

    def record_event(self) -> Event:
        current = torch.accelerator.current_stream(self._index)
        if self._model is None or self._model.stream_id != current.stream_id:
            # As torch.npu's events want it. Making one takes longer than all the rest here; the model stays on one.
            self._model = torch.npu.Stream(
                device=self._index,
                stream_id=current.stream_id,
                device_index=current.device_index,
                device_type=current.device_type,
            )
        return NpuEvent(self, self._model.record_event())

    def submit(self, work: Callable[[], None], after: Event) -> Event:
        if self._closed:
            raise DeviceError("the device is closed")
        if not isinstance(after, NpuEvent):
            raise TypeError(f"not an event of this device: {after!r}")
        failure: Exception | None = None
        # torch.npu.stream and torch.npu.current_stream find out which device is current first, by trying them all.
        before = torch.accelerator.current_stream(self._index)
        torch.npu.set_stream(self._side)
        try:
            self._side.wait_event(after.event)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - delivered by the event
                failure = error
            end = NpuEvent(self, self._side.record_event(), failure)
        except RuntimeError as error:
            raise self.failed(error) from error
        finally:
            torch.npu.set_stream(before)
        # Tensor.record_stream would hold the tensors too, but ends the process when one is freed on a failed device.
        while self._submitted and self._submitted[0][0].is_done():
            self._submitted.popleft()
        self._submitted.append((end, work))
        return end

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        try:
            # A copy of memory that is not pinned would wait until the device has done everything queued before,
            # which is the step before this one. Pinning looks at earlier copies' events, and raises what they say.
            return host.pin_memory(f"npu:{self._index}").to(f"npu:{self._index}", non_blocking=True)
        except RuntimeError as error:
            raise self.failed(error) from error

    def allocate(self, nbytes: int) -> torch.Tensor:
        whole = -(-nbytes // REGISTRATION_BYTES) * REGISTRATION_BYTES
        return aligned_buffer(whole, REGISTRATION_BYTES, self.name)

    def new_groups(self, rank_lists: Sequence[tuple[int, ...]], timeout_s: float) -> dict[tuple[int, ...], Group]:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        rank, timeout = dist.get_rank(), timedelta(seconds=timeout_s)
        groups: dict[tuple[int, ...], Group] = {}
        for ranks in rank_lists:
            options = ProcessGroupHCCL.Options()  # groups cannot share them: torch_npu writes into them
            options.hccl_config = hccl_config(ranks, torch.npu.get_device_name())
            group = dist.new_group(list(ranks), timeout=timeout, backend="hccl", pg_options=options)
            if rank in ranks:
                groups[ranks] = group
        if groups:
            self._meet()
            self._connect(groups, timeout_s)
        return groups

    def _meet(self) -> None:
        """Waits until all ranks are here, within a deadline, because connecting has a deadline and ranks may arrive at
        different times.

        `dist.barrier` would connect the world over HCCL, with buffers as large as the model's. The store has a deadline
        of its own.
        """
        store = dist.PrefixStore(f"vllm-ascend-pd/meeting/{self._meetings}", _get_default_store())
        self._meetings += 1
        store.set(str(dist.get_rank()), "")
        try:
            store.wait([str(rank) for rank in range(dist.get_world_size())])
        except RuntimeError as error:
            raise DeviceError(f"not all ranks arrived to connect over HCCL: {error}") from error

    def _connect(self, groups: Mapping[tuple[int, ...], Group], timeout_s: float) -> None:
        """torch_npu connects a group at its first collective, in the thread that calls it. This takes seconds, or
        HCCL_CONNECT_TIMEOUT where a rank is missing. So a thread of its own does it now."""
        failed: list[Exception] = []

        def exchange_first() -> None:
            """A tiny all-to-all in one group after the other, in the same order on all ranks."""
            try:
                self.bind_thread()
                with torch.npu.stream(torch.npu.Stream(device=self._index)):
                    for ranks, group in groups.items():
                        parts = torch.zeros(len(ranks), dtype=torch.uint8, device=self.name)
                        self.all_to_all(torch.empty_like(parts), parts, group)
                        NpuEvent(self, torch.npu.current_stream().record_event()).wait(timeout_s)
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = threading.Thread(target=exchange_first, name="pd-regroup-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if failed or thread.is_alive():
            reason = failed[0] if failed else f"this took longer than {timeout_s:g} s"
            raise DeviceError(f"ranks {', '.join(map(str, groups))} did not connect over HCCL: {reason}")

    def close(self) -> None:
        """Does nothing: there is no thread to stop, and queued work runs to its end on the NPU."""
        self._closed = True
