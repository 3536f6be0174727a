# SPDX-License-Identifier: Apache-2.0
"""Works out which prefill ranks must write to a decode rank before its KV is complete (R1)."""

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.topology import Sharding, writers_to

# Results kept. Prefill engines of more different shapes make the rank work them out again.
_MAX_SHAPES = 1024


class ExpectedWriters:
    """Finds the writers that one decode rank expects. Results are cached, since most tickets come from prefill engines
    of one shape.
    """

    def __init__(self, caches: RankCaches, rank: int, sharding: Sharding) -> None:
        """`rank`: the decode rank's place in its pipeline stage, as `sharding` counts."""
        self._caches = caches
        self._rank = rank
        self._sharding = sharding
        # By prefill's sharding, the replica, and prefill's draft if it is ours.
        self._known: dict[tuple[Sharding, int, str], frozenset[tuple[int, int]]] = {}

    def of(self, prefill: Sharding, replica_hash: int, draft: str) -> frozenset[tuple[int, int]]:
        """Returns pairs (index of a tensor of ours, rank in prefill's pipeline stage that must write to it).

        Draft layers expect nothing unless `draft`, prefill's draft model, is the one used here. Raises TopologyError
        if the engines cannot fit.
        """
        key = (prefill, replica_hash % len(prefill.shares), draft if draft == self._caches.draft else "")
        if key not in self._known:
            if len(self._known) >= _MAX_SHAPES:
                self._known.clear()
            self._known[key] = self._work_out(*key)
        return self._known[key]

    def _work_out(self, prefill: Sharding, replica_hash: int, draft: str) -> frozenset[tuple[int, int]]:
        total_heads = {
            index: geometry.total_heads
            for index, tensor in enumerate(self._caches.tensors)
            if (geometry := self._caches.geometry_of(tensor)).is_known_to(draft)
        }
        writers = {
            total: writers_to(self._rank, self._sharding, prefill, total, replica_hash)
            for total in set(total_heads.values())
        }
        return frozenset((index, writer) for index, total in total_heads.items() for writer in writers[total])
