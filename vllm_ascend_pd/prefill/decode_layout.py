# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank knows of a decode engine: where each of its tensors lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.core.layout import CacheTensor, Geometry
from vllm_ascend_pd.core.plan import Route, Target
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.ticket import Ticket


@dataclass(frozen=True)
class Remote:
    """A decode tensor: its rank, its index there, itself and how it lies in memory."""

    rank: RankDescription
    index: int
    tensor: CacheTensor
    geometry: Geometry

    @property
    def key(self) -> RankKey:
        return (self.rank.pp_rank, self.rank.tp_rank)


Part: TypeAlias = tuple[Target, Geometry]
"""What of every unit goes into one tensor of a decode rank, and how that lies in memory."""

Routes: TypeAlias = tuple[tuple[int, Route], ...]
"""Some of our geometries, by index, and how they travel."""

Cover: TypeAlias = tuple[RankDescription, tuple[int, ...]]
"""A decode rank, and which of its tensors are filled."""


@dataclass(frozen=True)
class Course:
    """What of a layer's tensors goes to one decode rank. `parts[n]` is of our tensor `sources[n]`, and goes to one of
    decode's whose block 0 is at `bases[n]`."""

    key: RankKey
    session: str
    sources: tuple[int, ...]
    parts: tuple[Part, ...]
    bases: tuple[int, ...]


class DecodeLayout:
    """Finds decode's tensors by name. A layer lives on one pipeline stage, on each tensor-parallel rank of it."""

    def __init__(self, description: EngineDescription) -> None:
        self.description = description
        self._remotes: dict[tuple[str, int, int], Remote] = {}
        self._courses: dict[tuple[str, int], tuple[Route, list[Course]]] = {}
        self._parts: dict[tuple[Part, ...], tuple[Part, ...]] = {}
        self._covers: dict[Routes, dict[RankKey, Cover]] = {}
        # What tickets must fit: of each group, by block size, the tensor with the fewest blocks.
        self._tightest: dict[tuple[int, int], Remote] = {}
        for rank in description.ranks:
            for index, tensor in enumerate(rank.caches.tensors):
                remote = Remote(rank, index, tensor, rank.caches.geometry_of(tensor))
                self._remotes[tensor.layer, tensor.part, rank.tp_rank] = remote
                of = (remote.geometry.group, remote.geometry.block_size)
                if of not in self._tightest or tensor.num_blocks < self._tightest[of].tensor.num_blocks:
                    self._tightest[of] = remote

    def locate(self, tensor: CacheTensor, tp_rank: int) -> Remote:
        """Where the KV of our `tensor` goes on decode's tensor-parallel rank `tp_rank`."""
        return self._remotes[tensor.layer, tensor.part, tp_rank]

    def covers(self, tensors: Sequence[CacheTensor], routes: Routes) -> dict[RankKey, Cover]:
        """What all our `tensors` of these geometries fill. For the control thread. Raises KeyError for one that decode
        does not have."""
        known = self._covers.get(routes)
        if known is None:
            known = self._covers[routes] = {
                key: (goes[0][2].rank, tuple(dict.fromkeys(remote.index for _, _, remote in goes)))
                for key, goes in self._by_rank(tensors, dict(routes)).items()
            }
        return known

    def courses(self, tensors: Sequence[CacheTensor], route: Route) -> list[Course]:
        """Where `tensors` of a layer, which lie alike, go by their geometry's `route`. For the sender's thread."""
        at = (tensors[0].layer, tensors[0].part)
        known = self._courses.get(at)
        if known is None or known[0] is not route:
            courses = [
                Course(
                    key,
                    goes[0][2].rank.session,
                    tuple(n for n, _, _ in goes),
                    self._shared(tuple((target, remote.geometry) for _, target, remote in goes)),
                    tuple(remote.tensor.base for _, _, remote in goes),
                )
                for key, goes in self._by_rank(tensors, {tensors[0].geometry: route}).items()
            ]
            known = self._courses[at] = route, courses
        return known[1]

    def _shared(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """One object for all layers that have the same `parts`: they are compared for every layer."""
        return self._parts.setdefault(parts, parts)

    def _by_rank(
        self, tensors: Sequence[CacheTensor], routes: Mapping[int, Route]
    ) -> dict[RankKey, list[tuple[int, Target, Remote]]]:
        """Of each decode rank: which of `tensors` go there by their geometries' routes, what of them, and where."""
        goes: dict[RankKey, list[tuple[int, Target, Remote]]] = {}
        for n, tensor in enumerate(tensors):
            if tensor.geometry in routes:
                for target in routes[tensor.geometry].targets:
                    remote = self.locate(tensor, target.tp_rank)
                    goes.setdefault(remote.key, []).append((n, target, remote))
        return goes

    def unfit(self, ticket: Ticket) -> str | None:
        """Why `ticket` cannot come from this engine (R6); None if it can."""
        description = self.description
        if ticket.remote_tp_size != description.tp:
            return f"the ticket says decode's tp is {ticket.remote_tp_size}, decode says {description.tp}"
        if ticket.sharding != description.sharding:
            return (
                f"the ticket says decode's dcp is {ticket.remote_dcp_size}, interleaved by "
                f"{ticket.remote_interleave_size}; decode says {description.dcp}, by {description.interleave}"
            )
        highest = [max(blocks, default=-1) for blocks in ticket.remote_block_ids]
        for remote in self._tightest.values():
            group = remote.geometry.group
            if group >= len(highest) or highest[group] >= remote.tensor.num_blocks:
                return f"the ticket names blocks that {remote.tensor.layer} on decode does not have"
            if ticket.remote_block_size[group] != remote.geometry.block_size:
                return (
                    f"the ticket says decode's block size is {ticket.remote_block_size[group]}, "
                    f"decode says {remote.geometry.block_size}"
                )
        return None
