# SPDX-License-Identifier: Apache-2.0
"""Which prefill ranks must write for a ticket."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_pd.core.bounds import MAX_CACHED_WRITES, MAX_EXPECTED_WRITES, MAX_SHAPES_WORKED_OUT
from vllm_ascend_pd.core.layout import Order, RankCaches
from vllm_ascend_pd.core.topology import Sharding, TopologyError, held, writers_to

if TYPE_CHECKING:
    from vllm_ascend_pd.decode.grants import OpenTicket


def expected_writers(
    caches: RankCaches, rank: int, decode: Sharding, prefill: Sharding, replica: int, draft: str
) -> frozenset[tuple[int, int]]:
    """Returns pairs (index of a tensor of ours, rank in prefill's pipeline stage that must write to it).

    `rank`: this rank's place in its pipeline stage. `draft`: draft layers expect nothing unless it is theirs. Raises
    TopologyError if the engines cannot fit, or there are more pairs than `MAX_EXPECTED_WRITES`.
    """
    found: set[tuple[int, int]] = set()
    for number, geometry in enumerate(caches.geometries):
        if geometry.is_known_to(draft):
            writing, reading = held(geometry, prefill, decode)
            exchange = geometry.order is Order.TOKEN_MAJOR
            writers = writers_to(rank, reading, writing, geometry.total_heads, replica, exchange=exchange)
            tensors = [i for i, tensor in enumerate(caches.tensors) if tensor.geometry == number]
            if len(found) + len(tensors) * len(writers) > MAX_EXPECTED_WRITES:
                raise TopologyError(f"more than {MAX_EXPECTED_WRITES} pairs of a tensor and its writer")
            found.update(itertools.product(tensors, writers))
    return frozenset(found)


class ExpectedWriters:
    """Works out `expected_writers` for prefill engines, and keeps the results for tickets of the same shape.

    It keeps `MAX_CACHED_WRITES` pairs, and works out no more than `MAX_SHAPES_WORKED_OUT` results for one ticket.
    """

    def __init__(self, expected: Callable[[Sharding, int, str], frozenset[tuple[int, int]]]) -> None:
        """`expected`: `expected_writers` of this rank."""
        self._expected = expected
        # Results, or why there is none. Those used last are at the end.
        self._known: OrderedDict[tuple[Sharding, int, str], frozenset[tuple[int, int]] | TopologyError] = OrderedDict()
        # What all of them take, counted in pairs.
        self._kept = 0

    def of(self, opened: "OpenTicket", prefill: Sharding, replica: int, draft: str) -> frozenset[tuple[int, int]]:
        """Returns the pairs for a ticket. Raises TopologyError."""
        key = (prefill, replica, draft)
        if key in self._known:
            self._known.move_to_end(key)
        else:
            if opened.shapes_worked_out >= MAX_SHAPES_WORKED_OUT:
                raise TopologyError(f"prefill engines of {MAX_SHAPES_WORKED_OUT} shapes have asked for this ticket")
            opened.shapes_worked_out += 1
            try:
                self._known[key] = self._expected(*key)
            except TopologyError as error:
                self._known[key] = error.with_traceback(None)
            self._kept += self._cost(key)
            while self._kept > MAX_CACHED_WRITES and len(self._known) > 1:
                oldest = next(iter(self._known))
                self._kept -= self._cost(oldest)
                del self._known[oldest]
        found = self._known[key]
        if isinstance(found, TopologyError):
            raise TopologyError(str(found))
        return found

    def _cost(self, key: tuple[Sharding, int, str]) -> int:
        found = self._known[key]
        return len(key[0].shares) + (0 if isinstance(found, TopologyError) else len(found))
