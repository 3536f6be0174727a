# SPDX-License-Identifier: Apache-2.0
"""Where KV goes: each cache tensor of a decode engine by its description, and our rank's mappings to its ranks.

The model's thread plans with a `RankMapping`, and the control thread finds a ticket's destinations with it. It follows
from the shapes alone. So if both threads find one missing, they make the same one.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.core.bounds import MAX_CACHED_TARGETS
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, RankCaches
from vllm_ascend_pd.core.plan import RankMapping, UnitPortion, make_mapping, why_slow
from vllm_ascend_pd.core.prefill_ticket import Destination, RankKey
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo, Sharding

logger = logging.getLogger(__name__)


ServedMappings: TypeAlias = tuple[tuple[int, RankMapping], ...]
"""Some of our geometries, by index, with their mappings."""


@dataclass(frozen=True)
class LayerTarget:
    """Where some tensors of one layer go on one decode rank."""

    key: RankKey
    # The decode rank's Mooncake session.
    session: str
    # For each tensor that is written: the portion of a unit, and how the decode tensor lies in memory.
    portions: tuple[tuple[UnitPortion, Geometry], ...]
    # Stands for `portions`: targets on one engine have the same number if these are equal. A write that was cut for one
    # of them fits the others.
    portions_id: int
    # For each portion: the index of our tensor that it is read from.
    sources: tuple[int, ...]
    # For each portion: the address of the decode tensor's block 0.
    bases: tuple[int, ...]


class DecodeLayout:
    """Finds a decode engine's tensors by name. A layer lives on one pipeline stage, on each tensor-parallel rank of it.

    Only its caches change. The control thread owns that of `destinations`, the sender's thread those of `targets`.
    """

    def __init__(self, description: EngineDescription) -> None:
        self.description = description
        self.ranks = {(rank.pp_rank, rank.tp_rank): rank for rank in description.ranks}
        # By layer, part and tensor-parallel rank: the decode rank that has the tensor, and its index there.
        self._tensors: dict[tuple[str, int, int], tuple[RankKey, int]] = {}
        self._targets: dict[tuple[str, int], tuple[RankMapping, tuple[LayerTarget, ...]]] = {}
        self._portions_ids: dict[tuple[tuple[UnitPortion, Geometry], ...], int] = {}
        self._covers: dict[ServedMappings, dict[RankKey, tuple[int, ...]]] = {}
        smallest: dict[tuple[int, int], tuple[CacheTensor, Geometry]] = {}
        for key, rank in self.ranks.items():
            for index, tensor in enumerate(rank.caches.tensors):
                self._tensors[tensor.layer, tensor.part, rank.tp_rank] = key, index
                geometry = rank.caches.geometry_of(tensor)
                kind = (geometry.group, geometry.block_size)
                if kind not in smallest or tensor.num_blocks < smallest[kind][0].num_blocks:
                    smallest[kind] = tensor, geometry
        # The tensors with the fewest blocks, one of each cache group and block size. Every ticket must fit them.
        self.smallest = tuple(smallest.values())

    def destinations(self, tensors: Sequence[CacheTensor], mappings: ServedMappings) -> dict[RankKey, Destination]:
        """Returns the decode ranks with tensors that our `tensors` of the mappings' geometries fill.

        Raises KeyError for a tensor that decode does not have.
        """
        covers = self._covers.get(mappings)
        if covers is None:
            covers = self._covers[mappings] = {
                key: tuple(dict.fromkeys(index for _, _, index in found))
                for key, found in self._by_rank(tensors, dict(mappings)).items()
            }
        return {key: Destination(self.ranks[key], indices) for key, indices in covers.items()}

    def targets(self, tensors: Sequence[CacheTensor], mapping: RankMapping) -> tuple[LayerTarget, ...]:
        """Returns where `tensors` go, which are one layer's tensors of the mapping's geometry."""
        at = (tensors[0].layer, tensors[0].part)
        known = self._targets.get(at)
        if known is None or known[0] is not mapping:
            found = self._by_rank(tensors, {tensors[0].geometry: mapping})
            known = self._targets[at] = mapping, tuple(self._target(key, of) for key, of in found.items())
        return known[1]

    def _target(self, key: RankKey, found: Sequence[tuple[int, UnitPortion, int]]) -> LayerTarget:
        rank = self.ranks[key]
        theirs = [rank.caches.tensors[index] for _, _, index in found]
        portions = tuple(zip((portion for _, portion, _ in found), map(rank.caches.geometry_of, theirs), strict=True))
        portions_id = self._portions_ids.setdefault(portions, len(self._portions_ids))
        bases = tuple(tensor.base for tensor in theirs)
        return LayerTarget(key, rank.session, portions, portions_id, tuple(n for n, _, _ in found), bases)

    def _by_rank(
        self, tensors: Sequence[CacheTensor], mappings: Mapping[int, RankMapping]
    ) -> dict[RankKey, list[tuple[int, UnitPortion, int]]]:
        """Returns for each decode rank: the index of our tensor, the portion of its units, and decode's index."""
        found: dict[RankKey, list[tuple[int, UnitPortion, int]]] = {}
        for n, tensor in enumerate(tensors):
            if tensor.geometry in mappings:
                for portion in mappings[tensor.geometry].portions:
                    key, index = self._tensors[tensor.layer, tensor.part, portion.tp_rank]
                    found.setdefault(key, []).append((n, portion, index))
        return found


class RankMappings:
    """Finds the mappings of one prefill rank, and each ticket's destinations by them."""

    def __init__(self, rank_info: RankInfo, caches: RankCaches) -> None:
        self._rank_info = rank_info
        self._caches = caches
        # By the geometry's index and decode's shape. The model's and the control thread read and write it.
        self._mappings: dict[tuple[int, Sharding, tuple[int, ...]], RankMapping] = {}
        # Targets and decode ranks of all of them, about: both threads write it, and an addition may be lost.
        self._kept = 0
        # Both threads write it. A second warning does no harm.
        self._warned_of_pieces = False

    def mapping(self, index: int, decode: Sharding, d_block_sizes: tuple[int, ...]) -> RankMapping:
        """Returns how caches of the geometry `index` map to a decode engine of this shape.

        Raises ValueError if the two sides do not fit."""
        key = (index, decode, d_block_sizes)
        mapping = self._mappings.get(key)
        if mapping is None:
            geometry = self._caches.geometries[index]
            rank_info = self._rank_info
            mapping = make_mapping(geometry, rank_info.rank, rank_info.sharding, decode, d_block_sizes[geometry.group])
            if self._kept > MAX_CACHED_TARGETS:
                self._mappings.clear()
                self._kept = 0
            self._mappings[key] = mapping
            self._kept += len(mapping.portions) + len(decode.shares)
            slow = why_slow(mapping, geometry, rank_info.sharding, decode, d_block_sizes[geometry.group])
            if slow is not None and not self._warned_of_pieces:
                self._warned_of_pieces = True
                logger.warning("%s", slow)
        return mapping

    def destinations(self, layout: DecodeLayout, ticket: Ticket) -> dict[RankKey, Destination]:
        """Returns the decode ranks that this rank writes to for the ticket, and which of their tensors it covers.

        Raises LookupError or ValueError if the ticket does not fit the layout."""
        block_sizes = tuple(ticket.remote_block_size)
        mappings = (
            (index, self.mapping(index, ticket.sharding, block_sizes))
            for index, geometry in enumerate(self._caches.geometries)
            if geometry.is_known_to(ticket.remote_draft)
        )
        served = tuple((index, mapping) for index, mapping in mappings if mapping.serves(ticket.replica_hash))
        return layout.destinations(self._caches.tensors, served)
