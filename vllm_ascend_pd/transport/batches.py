# SPDX-License-Identifier: Apache-2.0
"""What one call into Mooncake may carry, how long it may block, and how descriptors are cut into such batches. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from vllm_ascend_pd.core.plan import Descriptors, Offsets

KIB = 1024
MIB = 1024 * KIB

TCP_LANES = 4
"""Mooncake's default number of TCP connections to one peer (`MC_TCP_LANES_PER_PEER`)."""

LONGEST_SETTLE_S = 3600.0
"""The longest `settle_s` that a peer accepts, in seconds (core/protocol.py)."""

PAGE = 4 * KIB
"""Bytes are divided among connections in whole pages."""

# The shortest and the longest descriptor that a write is cut to for several connections. A shorter one costs more than
# it saves. A connection has one descriptor in flight. Up to the longest, its bytes stay in a processor's cache between
# their two copies. With 1 MiB, writes are half as fast (docs/performance.md).
_LEAST_PIECE = 128 * KIB
_MOST_PIECE = 256 * KIB


# As `TransferLimits.apply_s`. The shortest settling time over TCP.
_APPLY_S = 5.0


class SettingError(ValueError):
    """The environment holds a setting that Mooncake would not take."""


@dataclass(frozen=True)
class TransferLimits:
    """Limits what one call into Mooncake may carry, and how long it may block."""

    # Descriptors in one batch.
    max_descriptors: int = 2048
    # Bytes in one batch: the most that a failed batch makes the caller send again.
    max_bytes: int = 64 * MIB
    # Longer descriptors are cut.
    max_descriptor_bytes: int = 4 * MIB
    # Connections that a write's bytes are divided among. A descriptor takes one of them. 1: no cuts for this.
    connections: int = TCP_LANES
    # A batch fails if its last descriptor has not started after this long, or one makes no progress for this long. So
    # two batches of `max_bytes` must take less. Mooncake counts whole seconds, so it is rounded up.
    timeout_s: float = 10.0
    # Lower bound of `settle_s`, for settings in the environment that make Mooncake try for longer.
    settle_at_least_s: float = 0.0
    # Whether bytes of a failed write may still arrive. False over "ascend".
    failed_may_arrive: bool = True

    def __post_init__(self) -> None:
        least = min(self.max_descriptors, self.max_bytes, self.max_descriptor_bytes, self.connections)
        if least < 1 or self.timeout_s <= 0:
            raise ValueError(f"transfer limits must be positive: {self}")

    @classmethod
    def over(cls, protocol: str, timeout_s: float | None = None) -> TransferLimits:
        """Returns limits that suit `protocol`.

        Over TCP a descriptor costs about 30 us, so 2048 take 60 ms, and 64 MiB take about half a second on a slow link.
        Over "ascend" a batch is queued on one stream, 256 descriptors at a time, and waited for once, however long it
        is (HIXL, src/llm_datadist/adxl/comm_channel.cc). Short descriptors cost as much as those of 128 KiB, so none is
        cut.
        """
        timeout_s = timeout_s or cls.timeout_s
        if protocol == "tcp":
            return cls(timeout_s=timeout_s)
        return cls(8192, 1024 * MIB, max_descriptor_bytes=1024 * MIB, connections=1, timeout_s=timeout_s)

    def piece_bytes(self, num_bytes: int) -> int:
        """Returns the longest descriptor for a write of `num_bytes`."""
        longest = min(self.max_descriptor_bytes, self.max_bytes)
        if self.connections == 1:
            return longest
        share = math.ceil(min(num_bytes, self.max_bytes) / self.connections / PAGE) * PAGE
        return min(longest, max(share, _LEAST_PIECE), _MOST_PIECE)

    @property
    def whole_timeout_s(self) -> int:
        """`timeout_s` in the whole seconds that Mooncake counts."""
        return max(1, math.ceil(self.timeout_s))

    @property
    def settle_s(self) -> float:
        """Seconds after a write has begun, or has failed, until this process no longer reads and sends it.

        Over TCP, a descriptor is admitted within one timeout or never. It waits at most one more, and Mooncake's 1 s
        pause before it reconnects, for the connection before it. It is given up one timeout and one pause later. By
        then, bytes in socket buffers are the receiver's: a receiver that was stopped, not killed, applies up to a few
        MiB when it runs again. Over "ascend": `ascend.settle_s`, counted from the beginning.
        """
        return max(3 * self.whole_timeout_s + 2, self.settle_at_least_s)

    @property
    def apply_s(self) -> float:
        """Seconds after this process was stopped until what peers sent meanwhile is in its memory, or never will be.

        Over TCP, that is what lies in socket buffers: up to a few MiB for each connection, applied within milliseconds
        on an idle machine. Over "ascend" a peer's bytes do not pass through this process.
        """
        return _APPLY_S if self.failed_may_arrive else 0.0

    @property
    def rest_s(self) -> float:
        """Seconds after a failed write until its source memory may change."""
        return self.settle_s if self.failed_may_arrive else 0.0


Batch: TypeAlias = tuple[Sequence[int], Sequence[int], list[int]]
"""Sources, destinations and lengths. The first two are arrays of 64-bit integers, since Mooncake's C++ reads an
array in two thirds of the time that making a Python list takes."""


class PagedWrite:
    """Copies to one decode rank, in batches, for any base addresses: cut once a step, written for every layer.

    It consists of parts. Each has base addresses of its own, one for its sources and one for its destinations.
    """

    def __init__(self, parts: Sequence[Descriptors], limits: TransferLimits, num_bytes: Sequence[int]) -> None:
        """Cuts copies that are too long, and divides all into batches within `limits`, in order.

        `num_bytes`: of each request. They are counted, and change nothing here.
        """
        self.num_bytes = num_bytes
        self.total_bytes = sum(num_bytes)
        self._limits = limits
        longest = limits.piece_bytes(sum(int(part.nbytes.sum()) for part in parts))
        cut = {id(part): _cut(part, longest) for part in parts}  # K and V often are one object
        pieces = [cut[id(part)] for part in parts]
        stops = list(accumulate((len(piece.nbytes) for piece in pieces), initial=0))
        # Addresses, which `_batches_at` fills: fresh memory takes longer to fetch than the addresses take to add.
        self._sources, self._destinations = (array("q", bytes(8 * stops[-1])) for _ in range(2))
        src, dst = (np.frombuffer(addresses, dtype=np.int64) for addresses in (self._sources, self._destinations))
        # For each part: its offsets from the base addresses, and views of its addresses.
        self._parts = [
            (piece.src, piece.dst, src[begin:stop], dst[begin:stop])
            for piece, begin, stop in zip(pieces, stops, stops[1:], strict=False)
        ]
        # For each batch: where it begins and ends among all copies, and its lengths.
        self._batches: list[tuple[int, int, list[int]]] = []
        nbytes = np.concatenate([piece.nbytes for piece in pieces]) if pieces else np.empty(0, dtype=np.int64)
        ends, first = np.cumsum(nbytes), 0
        while first < len(nbytes):
            before = int(ends[first - 1]) if first else 0
            most = int(np.searchsorted(ends, before + limits.max_bytes, side="right"))
            stop = min(first + limits.max_descriptors, most)
            self._batches.append((first, stop, _list(nbytes[first:stop])))
            first = stop

    def at(self, places: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[Batch]:
        """Yields the batches of some layers, as few as the limits allow.

        `places`: for each layer, the base addresses of each part's sources and destinations. Every call writes into the
        same memory, so one thread uses a `PagedWrite`, for one call at a time.
        """
        if len(places) == 1:
            yield from self._batches_at(*places[0])
            return
        sources, destinations, num_bytes = array("q"), array("q"), 0
        lengths: list[int] = []
        for place in places:
            for src, dst, sizes in self._batches_at(*place):
                more = sum(sizes)
                is_full = len(lengths) + len(sizes) > self._limits.max_descriptors
                if lengths and (is_full or num_bytes + more > self._limits.max_bytes):
                    yield sources, destinations, lengths
                    sources, destinations, lengths, num_bytes = array("q"), array("q"), [], 0
                sources.extend(src)
                destinations.extend(dst)
                lengths += sizes
                num_bytes += more
        if lengths:  # the requests that are written may have no bytes here
            yield sources, destinations, lengths

    def _batches_at(
        self, sources: Sequence[int], destinations: Sequence[int]
    ) -> Iterator[tuple[array[int], array[int], list[int]]]:
        for (src, dst, src_addresses, dst_addresses), source, destination in zip(
            self._parts, sources, destinations, strict=True
        ):
            np.add(src, source, src_addresses)
            np.add(dst, destination, dst_addresses)
        if len(self._batches) == 1:
            yield self._sources, self._destinations, self._batches[0][2]
            return
        for first, stop, lengths in self._batches:
            yield self._sources[first:stop], self._destinations[first:stop], lengths


def _list(values: Offsets) -> list[int]:
    """Returns `values` as integers. If they are equal, as usual, they are one object: thousands of objects take longer
    to make here, and to read for every layer."""
    first = int(values[0])
    return [first] * len(values) if np.all(values == first) else values.tolist()


def _cut(copies: Descriptors, longest: int) -> Descriptors:
    """Returns the same bytes in as few copies as possible of at most `longest` bytes, of about equal whole pages."""
    if copies.nbytes.max(initial=0) <= longest:
        return copies
    counts = -(-copies.nbytes // longest)
    share = -(-copies.nbytes // np.maximum(counts, 1))
    pieces = np.minimum(-(-share // PAGE) * PAGE, longest)
    which = np.repeat(np.arange(len(counts)), counts)
    piece = pieces[which]
    offset = (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * piece
    return Descriptors(
        copies.src[which] + offset, copies.dst[which] + offset, np.minimum(copies.nbytes[which] - offset, piece)
    )
