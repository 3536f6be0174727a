# SPDX-License-Identifier: Apache-2.0
"""What a write to another NPU costs, by the size of its descriptors.

The figures are from HIXL's `benchmarks/performance_en.md` (fetched 2026-11-27), 128 MiB in all, from device to remote
device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

KIB = 1024
HIXL_SIZES = tuple((16 << n) * KIB for n in range(8))


@dataclass(frozen=True)
class WriteCosts:
    """The figures of one chip, link and engine."""

    # "A2" or "A3"; "measured".
    chip: str
    # What connects the NPUs.
    link: str
    # HIXL's engine: "comm", which Mooncake 0.3.11 uses, or "cs", which 0.3.13 uses with CANN 9.1 and driver 25.5.
    engine: str
    # Bytes in a second, in units of 10**9, by descriptors of the first of `sizes`.
    rates: tuple[float, ...]
    # The highest rate of this link with any engine, for longer descriptors than were measured.
    most: float
    # The highest rate within one machine of this chip, at which ranks exchange heads. None: unknown.
    exchange: float | None
    # Bytes of the measured descriptors, ascending.
    sizes: tuple[int, ...] = HIXL_SIZES

    def __str__(self) -> str:
        return f"{self.chip}, {self.link}, {self.engine}"

    def seconds(self, num_bytes: int) -> float:
        """Returns what one descriptor takes. Between two measured sizes time grows evenly.

        A shorter descriptor than was measured takes as long as the shortest that was. A longer one than was measured
        takes as long as the longest, until the link is full.
        """
        sizes = self.sizes[: len(self.rates)]
        times = [size / rate / 1e9 for size, rate in zip(sizes, self.rates, strict=True)]
        at_full_link = num_bytes / self.most / 1e9 if num_bytes > sizes[-1] else 0.0
        return max(float(np.interp(num_bytes, sizes, times)), at_full_link)

    def total(self, sizes: Iterable[int]) -> float:
        """Returns what descriptors of these sizes take one after the other, in seconds."""
        return sum(map(self.seconds, sizes))


_A3, _A2 = 165, 23.7
HIXL = (
    WriteCosts("A3", "HCCS, two machines", "comm", (3.5, 6.9, 13.0, 22.9, 37.5, 54.6, 71.7, 90.0), 165, _A3),
    WriteCosts("A3", "HCCS, one machine", "cs", (18.0, 36.7, 70.1, 122, 156, 161, 161, 165), 165, _A3),
    WriteCosts("A3", "RoCE, two machines", "comm", (7.8, 6.3, 10.8, 17.9, 22.2, 22.8, 22.9, 23.0), 23.9, _A3),
    WriteCosts("A3", "RoCE, two machines", "cs", (18.4, 23.2, 23.7, 23.8, 23.8, 23.8, 23.8, 23.9), 23.9, _A3),
    WriteCosts("A2", "RoCE, one machine", "comm", (0.72, 1.42, 2.84, 5.74), 23.7, _A2),
    WriteCosts("A2", "RoCE, one machine", "cs", (18.3, 22.7, 23.4, 23.5, 23.6, 23.6, 23.6, 23.7), 23.7, _A2),
)
