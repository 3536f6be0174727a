# SPDX-License-Identifier: Apache-2.0
"""Points in the order of a device's work. Reading a trace needs these, and no torch."""

from abc import ABC, abstractmethod


class DeviceError(Exception):
    """Something queued on the device failed, or the device takes no more work. The cause is chained."""


class Event(ABC):
    """A point in the order of a stream. Any thread may wait for it, any number of times."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Block the calling thread until everything before this point is done.

        Raises `TimeoutError` when that takes longer than `timeout_s` seconds (the work goes on), and
        `DeviceError` from its cause when the work that this event ends has failed.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Whether everything before this point is done, successfully or not. Does not wait."""
