# SPDX-License-Identifier: Apache-2.0
"""What one call into Mooncake may carry, for how long it may block, and the settings that make Mooncake keep to it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vllm_ascend_pd.core.hosts import ip_version
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.transport import ascend
from vllm_ascend_pd.transport.mooncake_library import FORCE_TCP
from vllm_ascend_pd.transport.peer_queue import most_descriptors

KIB = 1024
MIB = 1024 * KIB


_TCP_TIMEOUTS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": 1.0,
    "MC_TCP_STATUS_TIMEOUT_SEC": 1.0,
    "MC_TCP_ADMISSION_TIMEOUT_MS": 1e-3,
}
"""What `TransferLimits.settle_s` counts on, and their units in seconds."""

TCP_LANES = 4
"""Mooncake's default number of TCP connections to one peer (`MC_TCP_LANES_PER_PEER`)."""

_TCP_QUEUE = ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER")
"""What Mooncake's queue to one peer takes is the sum of these."""


PAGE, _LEAST_PIECE, _MOST_PIECE = 4 * KIB, 128 * KIB, 256 * KIB
"""Bytes are dealt out to connections in whole pages, and no fewer than take about as long as a descriptor costs. A
connection has one descriptor under way at a time: up to the longest, what is on its way stays in a processor's cache
between its two copies; with 1 MiB it is half as fast (docs/performance.md)."""


class SettingError(ValueError):
    """The environment holds what Mooncake would not take."""


@dataclass(frozen=True)
class TransferLimits:
    """What one call into Mooncake may carry, and for how long it may block."""

    max_descriptors: int = 2048
    """Descriptors in one batch."""
    max_bytes: int = 64 * MIB
    """Bytes in one batch: what a failed batch makes the caller send again."""
    max_descriptor_bytes: int = 4 * MIB
    """Longer descriptors are cut."""
    connections: int = TCP_LANES
    """That a write's bytes are dealt out to: a descriptor goes over one of them. 1: descriptors are not cut for it."""
    timeout_s: float = 10.0
    """A batch fails when its last descriptor is not under way after this long, or one makes no progress for
    this long; so two batches of `max_bytes` must take less. Mooncake counts in whole seconds: rounded up."""
    settle_at_least_s: float = 0.0
    """Lower bound of `settle_s`, where what the user has set in the environment makes Mooncake try for longer."""
    failed_may_arrive: bool = True
    """Whether bytes of a write that has failed may still arrive. False with protocol `ascend`."""

    def __post_init__(self) -> None:
        least = min(self.max_descriptors, self.max_bytes, self.max_descriptor_bytes, self.connections)
        if least < 1 or self.timeout_s <= 0:
            raise ValueError(f"transfer limits must be positive: {self}")

    @classmethod
    def over(
        cls,
        protocol: str,
        max_descriptors: int | None = None,
        max_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> TransferLimits:
        """What is not given as it suits `protocol`.

        Over TCP a descriptor costs about 30 us, so 2048 are 60 ms; 64 MiB are about half a second of a slow link. Over
        "ascend" a batch is queued on one stream, 256 descriptors at a time, and waited for once, however long it is
        (HIXL, src/llm_datadist/adxl/comm_channel.cc).
        """
        suits = cls() if protocol == "tcp" else cls(max_descriptors=8192, max_bytes=1024 * MIB)
        return cls(
            max_descriptors or suits.max_descriptors,
            max_bytes or suits.max_bytes,
            timeout_s=timeout_s or suits.timeout_s,
        )

    def piece_bytes(self, num_bytes: int) -> int:
        """How long a descriptor of a write of `num_bytes` may be."""
        longest = min(self.max_descriptor_bytes, self.max_bytes)
        if self.connections == 1:
            return longest
        share = math.ceil(min(num_bytes, self.max_bytes) / self.connections / PAGE) * PAGE
        return min(longest, max(share, _LEAST_PIECE), _MOST_PIECE)

    @property
    def whole_timeout_s(self) -> int:
        """`timeout_s` as Mooncake can count it."""
        return max(1, math.ceil(self.timeout_s))

    @property
    def settle_s(self) -> float:
        """Seconds after a write has begun, or has failed, until this process has stopped reading and sending it.

        Over TCP, a descriptor is admitted within one timeout or never, waits at most one more (and Mooncake's 1 s pause
        before it reconnects) for the connection before it, and is then given up one timeout and one pause
        later. What lies in socket buffers by then is the receiver's: a receiver that was stopped, not dead,
        applies up to a few MiB when it runs again. With protocol `ascend`: `ascend.settle_s`, from the beginning.
        """
        return max(3 * self.whole_timeout_s + 2, self.settle_at_least_s)

    @property
    def rest_s(self) -> float:
        """Seconds after a failed write until its sources may change."""
        return self.settle_s if self.failed_may_arrive else 0.0

    def environment(self) -> dict[str, str]:
        """Mooncake's settings for these limits: it reads them from the environment when an engine starts.

        Sources: `transfer_engine_py.cpp` (`MC_TRANSFER_TIMEOUT`, seconds, never below 5: a backstop here),
        `tcp_transport_session_impl.h` (`MC_TCP_PROGRESS_TIMEOUT_SEC` while bytes flow,
        `MC_TCP_STATUS_TIMEOUT_SEC` for the receiver's acknowledgement), `tcp_transport.cpp` (the queue of
        each peer) and `config.cpp` (`MC_HANDSHAKE_CONNECT_TIMEOUT`, `MC_LOG_LEVEL`). `ascend.settings` has what
        protocol `ascend` needs beyond them.

        The queue proper is as short as the number of connections: what waits in it waits without a deadline, while
        what waits for admission to it expires after `MC_TCP_ADMISSION_TIMEOUT_MS`. With Mooncake's defaults a
        failed batch of 512 descriptors keeps trying for minutes; so it stops within `settle_s`.
        """
        seconds = str(self.whole_timeout_s)
        return {
            "MC_TRANSFER_TIMEOUT": str(max(5, self.whole_timeout_s + 1)),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
            "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
            "MC_TCP_ADMISSION_TIMEOUT_MS": str(1000 * self.whole_timeout_s),
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(TCP_LANES),
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
            "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
            "MC_LOG_LEVEL": "WARNING",
        }


_IPV6 = "MC_USE_IPV6"
"""Mooncake's processes listen and connect either over IPv4 or, where this is set to whatever, over IPv6."""


def export_settings(limits: TransferLimits, protocol: str, host: str) -> TransferLimits:
    """Puts Mooncake's settings for `limits` and for an engine at `host` into the environment. What was there already
    wins: returns the limits as that makes them; `limits_over_ascend` has the rest. Raises SettingError for settings
    that cannot work."""
    settings = limits.environment()
    if protocol != "tcp" and FORCE_TCP in os.environ:
        raise SettingError(
            f"{FORCE_TCP} is set, which turns {protocol!r} into TCP: unset it, or set transfer_protocol to tcp"
        )
    version = ip_version(host)
    if version == 6:
        settings[_IPV6] = "1"
    elif version == 4 and _IPV6 in os.environ:
        raise SettingError(
            f"{_IPV6} is set, and this host's address is IPv4, where Mooncake would not be found: unset it, or set "
            "VLLM_HOST_IP to this host's IPv6 address"
        )
    if protocol == "ascend":
        settings |= {**ascend.settings(limits.whole_timeout_s, os.environ), "MC_LOG_LEVEL": ascend.LOG_LEVEL}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if protocol == "ascend":
        return dataclasses.replace(limits, connections=1)
    longest = max(_in_effect(name, float) * unit for name, unit in _TCP_TIMEOUTS.items())
    return dataclasses.replace(
        limits,
        settle_at_least_s=dataclasses.replace(limits, timeout_s=max(limits.timeout_s, longest)).settle_s,
        max_descriptors=min(limits.max_descriptors, most_descriptors(queue_capacity())),
        connections=limits.connections if protocol == "tcp" else 1,
    )


def queue_capacity() -> int:
    """Descriptors that Mooncake's queue to one peer takes, over TCP and with the environment's settings."""
    return sum(_in_effect(name, int) for name in _TCP_QUEUE)


def limits_over_ascend(limits: TransferLimits, transport: TransportInfo) -> TransferLimits:
    """As the environment and the started engine make them. Raises SettingError."""
    settle_s = ascend.settle_s(limits.whole_timeout_s, os.environ, transport)
    if settle_s > ascend.LONGEST_S:
        raise SettingError(
            f"with these ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT a batch may take {settle_s:.0f} s, and "
            f"decode waits for {ascend.LONGEST_S:.0f} s: lower them"
        )
    if ascend.pool_size(os.environ) < 1:
        raise SettingError(f"{ascend.POOL_SIZE}={os.environ[ascend.POOL_SIZE]!r}: Mooncake would write nothing")
    return dataclasses.replace(limits, settle_at_least_s=settle_s, failed_may_arrive=False)


_Number = TypeVar("_Number", int, float)


def _in_effect(name: str, number: Callable[[str], _Number]) -> _Number:
    text = os.environ[name]
    with contextlib.suppress(ValueError):
        value = number(text)
        if value > 0:
            return value
    # Mooncake would take its own default, and what is counted here would be wrong.
    raise SettingError(f"{name}={text!r} is not a number over 0")
