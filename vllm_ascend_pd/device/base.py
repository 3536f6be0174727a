# SPDX-License-Identifier: Apache-2.0
"""The interface of a device: one side stream, events, registrable buffers and collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from vllm_ascend_pd.device.event import Event

Group: TypeAlias = dist.ProcessGroup | dist.distributed_c10d.Backend
"""What collectives run in."""


class Device(ABC):
    """The device of this process. `record_event` and `submit` belong to the model thread."""

    name: str
    """As in `torch.device`: "npu" or "cpu"."""
    transfer_protocol: str
    """Mooncake's protocol for memory of this device: "ascend" or "tcp"."""
    failure: str | None = None
    """Why the device does no more work, and the engine must be restarted; None while it works. Written once, by
    whichever thread sees the failure first. Any thread reads it."""

    @abstractmethod
    def record_event(self) -> Event:
        """Returns the end of everything that the calling (model) thread has queued on the device so far."""

    @abstractmethod
    def submit(self, work: Callable[[], None], after: Event) -> Event:
        """Run `work` on the side stream, after `after` and after all work submitted earlier; return its end.

        `after` is an event of this device. It only orders: `work` runs even if what `after` ends has failed,
        so that every rank takes part in every collective. `work` must not wait for events itself, and the
        memory it touches must stay as it is until the returned event; tensors it refers to are held as long,
        whatever becomes of the event. What it raises is delivered by the returned event alone.

        On a CPU `work` is called on another thread, and this call blocks until the queue has room, for a bounded time.
        On an NPU `work` is called on this thread, under the side stream: this call blocks as long as `work` does.
        Raises `DeviceError` when nothing can be queued.
        """

    @abstractmethod
    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copies `host` (CPU) into this device's memory, for work submitted from now on. Does not wait for the device.

        Raises `DeviceError` when nothing can be queued.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns an uninitialised uint8 buffer `[n]`, n >= `nbytes`, whose whole memory the transfer engine can
        register.
        """

    def idle(self, timeout_s: float) -> None:
        """Waits until the device has done all that was queued and submitted. Raises `DeviceError`, and TimeoutError."""
        self.submit(lambda: None, self.record_event()).wait(timeout_s)

    @abstractmethod
    def close(self) -> None:
        """Stops the side stream: running work ends, work that has not begun fails. Bounded. May be called twice."""

    @abstractmethod
    def new_groups(self, rank_lists: Sequence[tuple[int, ...]], timeout_s: float) -> dict[tuple[int, ...], Group]:
        """Create and connect one process group for each list of global ranks; return those this rank belongs to.

        A collective of the whole default group: every rank calls it with the same lists in the same order.
        A collective in such a group fails after `timeout_s` seconds; the group is unusable from then on.
        Raises `DeviceError` when the ranks of a group have not connected within `timeout_s` seconds.
        """

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, group: Group) -> None:
        """Send the j-th of `inp`'s equal parts to rank j of `group`; part i of `out` comes from rank i.

        Call it in submitted work: it runs on the current stream. `out` and `inp` must be contiguous uint8 tensors
        of the same size, a multiple of the group's size. This is not checked, because it runs for every layer.
        """
        assert isinstance(group, dist.ProcessGroup)
        dist.all_to_all_single(out, inp, group=group)


def aligned_buffer(nbytes: int, alignment: int, device: str) -> torch.Tensor:
    """Returns an uninitialised uint8 tensor `[nbytes]` on `device` whose address is a multiple of `alignment`."""
    buffer = torch.empty(nbytes + alignment, dtype=torch.uint8, device=device)
    start = -buffer.data_ptr() % alignment
    return buffer[start : start + nbytes]
