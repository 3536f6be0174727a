# SPDX-License-Identifier: Apache-2.0
"""Measures how far a peer's clock is from this host's."""

import math

from vllm_ascend_pd.core.protocol import ClockReading
from vllm_ascend_pd.observe.events import ClockOffset


def measured_offset(asked_s: float, reading: ClockReading, answered_s: float) -> ClockOffset | None:
    """Returns the peer's clock minus ours, by NTP's formula, which assumes that both ways of the round trip take
    equally long.

    The error is at most half of the round trip. Returns None for a reading that cannot be right.
    """
    on_the_way = (answered_s - asked_s) - (reading.sent_s - reading.received_s)
    offset = ((reading.received_s - asked_s) + (reading.sent_s - answered_s)) / 2
    if not (math.isfinite(offset) and reading.sent_s >= reading.received_s and on_the_way >= 0):
        return None
    return ClockOffset(reading.clock, offset * 1e6, on_the_way / 2 * 1e6)
