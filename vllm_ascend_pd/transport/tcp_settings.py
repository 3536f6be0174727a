# SPDX-License-Identifier: Apache-2.0
"""Mooncake's settings over TCP, and the limits that follow from them.

Sources: Mooncake's `tcp_transport_session_impl.h` (`MC_TCP_PROGRESS_TIMEOUT_SEC` while bytes flow,
`MC_TCP_STATUS_TIMEOUT_SEC` for the receiver's acknowledgement) and `tcp_transport.cpp` (the queue of each peer).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from typing import TypeVar

from vllm_ascend_pd.transport.batches import LONGEST_SETTLE_S, TCP_LANES, SettingError, TransferLimits
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT


def most_descriptors(capacity: int) -> int:
    """Returns the most descriptors of a batch for a queue of `capacity`, half of which is for failed batches' rest."""
    return max(1, capacity // (2 * BATCHES_IN_FLIGHT))


# Timeouts that `TransferLimits.settle_s` depends on, and their units in seconds.
_TIMEOUTS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": 1.0,
    "MC_TCP_STATUS_TIMEOUT_SEC": 1.0,
    "MC_TCP_ADMISSION_TIMEOUT_MS": 1e-3,
}
# Mooncake's queue to one peer takes the sum of these.
_QUEUE = ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER")

_Number = TypeVar("_Number", int, float)


def settings(timeout_s: int) -> dict[str, str]:
    """Returns the environment that makes a failed batch stop within `TransferLimits.settle_s`.

    The queue proper is as short as the number of connections. What waits in it has no deadline. What waits for
    admission to it expires after `MC_TCP_ADMISSION_TIMEOUT_MS`. With Mooncake's defaults, a failed batch of 512
    descriptors is retried for minutes.
    """
    return {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(timeout_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(timeout_s),
        "MC_TCP_ADMISSION_TIMEOUT_MS": str(1000 * timeout_s),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(TCP_LANES),
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    }


def limits_in_effect(limits: TransferLimits, protocol: str) -> TransferLimits:
    """Returns `limits` as the environment's settings make them. `protocol`: "tcp" or "rdma". Raises SettingError."""
    longest = max(_in_effect(name, float) * unit for name, unit in _TIMEOUTS.items())
    settle_s = dataclasses.replace(limits, timeout_s=max(limits.timeout_s, longest)).settle_s
    if settle_s > LONGEST_SETTLE_S:
        raise SettingError(
            f"with these {', '.join(_TIMEOUTS)} a failed batch may arrive for {settle_s:.0f} s, and decode waits for "
            f"{LONGEST_SETTLE_S:.0f} s: lower them"
        )
    return dataclasses.replace(
        limits,
        settle_at_least_s=settle_s,
        max_descriptors=min(limits.max_descriptors, most_descriptors(queue_capacity())),
        connections=limits.connections if protocol == "tcp" else 1,
    )


def queue_capacity() -> int:
    """Returns how many descriptors Mooncake's queue to one peer takes with the environment's settings."""
    return sum(_in_effect(name, int) for name in _QUEUE)


def _in_effect(name: str, number: Callable[[str], _Number]) -> _Number:
    text = os.environ[name]
    with contextlib.suppress(ValueError):
        value = number(text)
        if 0 < value < math.inf:
            return value
    # Mooncake would use its own default, and the limits computed here would be wrong.
    raise SettingError(f"{name}={text!r} is not a positive number")
