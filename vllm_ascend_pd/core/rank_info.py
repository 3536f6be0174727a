# SPDX-License-Identifier: Apache-2.0
"""Who a worker is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_ascend_pd.core.layout import TokenShare
from vllm_ascend_pd.core.topology import Sharding


@dataclass(frozen=True)
class RankInfo:
    """One rank of one engine. `host` is the address peers reach it at; `model` a summary both sides compare; `rank`
    its place in its pipeline stage, as `sharding` counts; `stage_ranks` are the ranks of that stage in torch's default
    world, in order; `draft` is what drafts on the engine, on whichever rank (`Geometry.draft`); `settings` are
    what both sides compare, as `EngineDescription` has them."""

    engine_id: str
    model: str
    host: str
    rank: int
    sharding: Sharding
    pp_rank: int
    pp: int
    stage_ranks: tuple[int, ...]
    draft: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        return self.sharding.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def share(self) -> TokenShare:
        """The tokens whose KV this rank holds."""
        return self.sharding.share(self.rank)
