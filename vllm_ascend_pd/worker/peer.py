# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank knows of a decode engine: where each of its tensors lies."""

from dataclasses import dataclass

from vllm_ascend_pd.core.layout import CacheTensor, Geometry
from vllm_ascend_pd.core.producer_ticket import RankKey
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


class DecodeLayout:
    """Finds decode's tensors by name. A layer lives on one pipeline stage, on each tensor-parallel rank of it."""

    def __init__(self, description: EngineDescription) -> None:
        self.description = description
        self._remotes: dict[tuple[str, int, int], Remote] = {}
        for rank in description.ranks:
            for index, tensor in enumerate(rank.caches.tensors):
                remote = Remote(rank, index, tensor, rank.caches.geometry_of(tensor))
                self._remotes[tensor.layer, tensor.part, rank.tp_rank] = remote

    def locate(self, tensor: CacheTensor, tp_rank: int) -> Remote:
        """Where the KV of our `tensor` goes on decode's tensor-parallel rank `tp_rank`."""
        return self._remotes[tensor.layer, tensor.part, tp_rank]

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
        for remote in self._remotes.values():
            group = remote.geometry.group
            if group >= len(highest) or highest[group] >= remote.tensor.num_blocks:
                return f"the ticket names blocks that {remote.tensor.layer} on decode does not have"
            if ticket.remote_block_size[group] != remote.geometry.block_size:
                return (
                    f"the ticket says decode's block size is {ticket.remote_block_size[group]}, "
                    f"decode says {remote.geometry.block_size}"
                )
        return None
