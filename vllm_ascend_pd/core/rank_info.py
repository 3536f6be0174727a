# SPDX-License-Identifier: Apache-2.0
"""Facts about one rank that do not change while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_ascend_pd.core.layout import TokenShare
from vllm_ascend_pd.core.topology import Sharding


@dataclass(frozen=True)
class RankInfo:
    """One rank of one engine."""

    engine_id: str
    # A summary of the model's shape, which both sides compare.
    model: str
    # The address for peers.
    host: str
    # The place in the pipeline stage, as `sharding` counts.
    rank: int
    # How the ranks of the stage share KV.
    sharding: Sharding
    # The pipeline stage.
    pp_rank: int
    # Pipeline-parallel size.
    pp: int
    # Ranks of this stage in torch's default world, in order.
    stage_ranks: tuple[int, ...]
    # The engine's draft model, on whichever rank (`Geometry.draft`).
    draft: str = ""
    # Settings that both sides compare, as in `EngineDescription`.
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.sharding.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def share(self) -> TokenShare:
        """The tokens whose KV is on this rank."""
        return self.sharding.share(self.rank)
