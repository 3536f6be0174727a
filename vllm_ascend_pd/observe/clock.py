# SPDX-License-Identifier: Apache-2.0
"""Clocks of hosts: which one a process reads, and how far a peer's is from it."""

import hashlib
import math
import os
import secrets
from pathlib import Path

from vllm_ascend_pd.core.protocol import ClockReading
from vllm_ascend_pd.observe.events import Offset

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _host_clock() -> str:
    """Names the monotonic clock: processes of a host share it, unless they live in different time namespaces."""
    try:
        source = _BOOT_ID.read_text() + os.readlink("/proc/self/ns/time")
    except OSError:
        source = secrets.token_hex(16)  # not known to be anybody else's
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


HOST_CLOCK = _host_clock()


def measured_offset(asked_s: float, reading: ClockReading, answered_s: float) -> Offset | None:
    """As NTP does: the peer's clock minus ours, were the way there as long as the way back. What they differ by is
    at most the round trip, so half of it is the uncertainty. None for a reading that cannot be right."""
    on_the_way = (answered_s - asked_s) - (reading.sent_s - reading.received_s)
    offset = ((reading.received_s - asked_s) + (reading.sent_s - answered_s)) / 2
    if not (math.isfinite(offset) and reading.sent_s >= reading.received_s and on_the_way >= 0):
        return None
    return Offset(reading.clock, offset * 1e6, on_the_way / 2 * 1e6)
