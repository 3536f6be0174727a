# SPDX-License-Identifier: Apache-2.0
"""Which KV heads and tokens a rank holds, and which ranks write to which.

Heads are divided as in vLLM. With `tp <= total` each rank holds `total / tp` neighbouring heads. With `tp > total`
each head is held by `tp / total` neighbouring ranks, which are replicas. With context parallelism, ranks with the same
heads share the tokens, so only those with equal heads and tokens are replicas.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from vllm_ascend_pd.core.bounds import MAX_TP
from vllm_ascend_pd.core.layout import ALL_TOKENS, BlockKind, Geometry, TokenShare


class TopologyError(ValueError):
    """Parallel sizes do not fit a number of KV heads, or each other."""


def replicas(tp: int, total: int) -> int:
    """Returns how many of `tp` ranks hold the same heads. Raises TopologyError."""
    if tp < 1 or total < 1 or (tp % total and total % tp):
        raise TopologyError(f"tensor parallel size {tp} and {total} KV heads: neither divides the other")
    return max(1, tp // total)


class Sharding(msgspec.Struct, frozen=True, array_like=True, dict=True):  # dict: for cached_property
    """How the ranks of a pipeline stage share its KV.

    Rank `r` of a stage is tensor-parallel rank `r % tp`, which decides its heads, and prefill-context-parallel rank
    `r // tp`.
    """

    # Tensor-parallel size.
    tp: Annotated[int, msgspec.Meta(gt=0, le=MAX_TP)]
    # Each rank's share of the tokens.
    shares: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_TP)], ...], msgspec.Meta(min_length=1, max_length=MAX_TP)
    ]
    # As in `TokenShare`.
    interleave: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] = 1

    @property
    def copies(self) -> "Sharding":
        """The same ranks, if each has all tokens of its heads."""
        return Sharding(self.tp, (0,) * len(self.shares))

    @functools.cached_property
    def parts(self) -> int:
        """The number of shares that tokens are divided into."""
        return max(self.shares, default=0) + 1

    def share(self, rank: int) -> TokenShare:
        """Returns the tokens that `rank` holds."""
        return self.part(self.shares[rank])

    def part(self, index: int) -> TokenShare:
        """Returns the tokens of share `index`."""
        parts = self.parts
        return TokenShare(parts, index, self.interleave) if parts > 1 else ALL_TOKENS

    def heads(self, rank: int, total: int) -> range:
        """Returns the heads that `rank` holds, numbered over the whole model."""
        copies, count = replicas(self.tp, total), max(1, total // self.tp)
        first = rank % self.tp // copies * count
        return range(first, first + count)

    def replicas(self, total: int) -> int:
        """Returns how many ranks hold the same heads of the same tokens. Raises TopologyError if that differs."""
        copies = replicas(self.tp, total)
        holders = self._holders(total)
        counts = {len(ranks) for ranks in holders.values()}
        if len(self.shares) % self.tp or len(holders) != self.tp // copies * self.parts or len(counts) > 1:
            raise TopologyError(
                f"{len(self.shares)} ranks with tensor parallel size {self.tp} do not all share the tokens of "
                f"{total} KV heads by {self.parts}: the {copies} ranks that hold the same heads must divide evenly"
            )
        return counts.pop()

    def holders(self, head: int, total: int, share: int) -> tuple[int, ...]:
        """Returns the ranks that hold `head` of the tokens in `share`, ascending."""
        return tuple(self._holders(total).get((head // max(1, total // self.tp), share), ()))

    def replica_index(self, rank: int, total: int) -> int:
        """Returns the place of `rank` among the ranks that hold the same heads and tokens."""
        group = rank % self.tp // replicas(self.tp, total)
        return self._holders(total)[group, self.shares[rank]][rank]

    def _holders(self, total: int) -> dict[tuple[int, int], dict[int, int]]:
        """Returns the ranks that hold the same heads and tokens, each with its place among them, by heads and share.

        Heads are numbered by what one rank holds of `total`. All ranks are looked at once.
        """
        known = self._holders_of.get(total)
        if known is None:
            copies = replicas(self.tp, total)
            found: dict[tuple[int, int], dict[int, int]] = {}
            for rank, share in enumerate(self.shares):
                group = found.setdefault((rank % self.tp // copies, share), {})
                group[rank] = len(group)
            known = self._holders_of[total] = found
        return known

    @functools.cached_property
    def _holders_of(self) -> dict[int, dict[tuple[int, int], dict[int, int]]]:
        """What `_holders` has returned, by number of heads. This engine's caches have few numbers."""
        return {}


@functools.lru_cache(maxsize=64)  # of tickets, too: an entry may have 1,024 ranks
def sharding(tp: int, dcp: int = 1, interleave: int = 1, pcp: int = 1) -> Sharding:
    """Divides tokens as vLLM 0.23 and vllm-ascend do. Raises TopologyError for sizes below 1.

    `dcp`: decode context parallelism, among neighbouring tensor-parallel ranks.
    `pcp`: prefill context parallelism, which multiplies the ranks.
    """
    if min(tp, dcp, interleave, pcp) < 1:
        raise TopologyError(f"parallel sizes: tp {tp}, dcp {dcp}, pcp {pcp}, interleaved by {interleave}")
    shares = tuple(pcp_rank * dcp + tp_rank % dcp for pcp_rank in range(pcp) for tp_rank in range(tp))
    return Sharding(tp, shares, interleave if dcp * pcp > 1 else 1)


def held(geometry: Geometry, prefill: Sharding, decode: Sharding) -> tuple[Sharding, Sharding]:
    """Returns how prefill's and decode's ranks share what is sent of such a cache.

    Context parallelism shares tokens. Each of its ranks has a whole state of its heads. Of a cache that is copied,
    prefill's ranks send a share each, and decode's ranks want all tokens.
    """
    if geometry.kind is BlockKind.STATE:
        return prefill.copies, decode.copies
    return prefill, decode.copies if geometry.copied else decode


def lanes(prefill: Sharding, decode: Sharding, total: int) -> tuple[int, int]:
    """Returns how many lanes there are, and how many prefill ranks are in each.

    The prefill ranks that hold the same KV divide the decode ranks that want it. On both sides, replica `i` is in lane
    `i % count`. The prefill ranks of a lane divide the tickets. So equally many ranks on both sides write one to
    one, and nothing is sent twice while another rank is idle.

    Raises TopologyError if `total` heads do not fit one of the engines.
    """
    copies = prefill.replicas(total)
    count = math.gcd(copies, decode.replicas(total))
    return count, copies // count


def exchanged_heads(head: int, p_heads: int, d_heads: int) -> range:
    """Returns the fewest heads around `head` that are whole prefill ranks and whole decode ranks.

    `p_heads`, `d_heads`: heads of a rank. The prefill ranks of these heads exchange them, and each of them writes to
    all of the decode ranks.
    """
    count = math.lcm(p_heads, d_heads)
    return range(head // count * count, (head // count + 1) * count)


def writers_to(
    d_rank: int, decode: Sharding, prefill: Sharding, total: int, replica_hash: int, exchange: bool
) -> tuple[int, ...]:
    """Returns the prefill ranks that write to decode's `d_rank`, ascending.

    They are those that hold some of its tokens in a prompt that is long enough, and some of its heads, or exchange
    heads with such a rank (`exchange`: caches are token-major). One that has nothing of a short prompt to write still
    reports. Where several prefill ranks hold the same heads and tokens, `Ticket.replica_hash` picks one of them, so
    that requests spread over them.
    """
    count, replicas = lanes(prefill, decode, total)
    writer = replica_hash % replicas * count + decode.replica_index(d_rank, total) % count
    heads = decode.heads(d_rank, total)
    if exchange:
        heads = exchanged_heads(heads.start, len(prefill.heads(0, total)), len(heads))
    wanted = decode.share(d_rank)
    shares = [share for share in range(prefill.parts) if prefill.part(share).meets(wanted)]
    return tuple(sorted({prefill.holders(head, total, share)[writer] for head in heads for share in shares}))


def regroup_groups(prefill: Sharding, total: int) -> list[tuple[int, ...]]:
    """Returns every set of prefill ranks that may have to exchange heads with an all-to-all, whatever decode's size.

    There is one group per ratio that divides the ranks holding different heads, per share of the tokens, and per
    replica. Ranks in a group are in the order of their heads. The list is the same on every rank, as creating process
    groups requires.
    """
    owners = prefill.tp // replicas(prefill.tp, total)
    copies = prefill.replicas(total)
    heads = total // owners  # of each: replicas are of single heads
    groups = []
    for ratio in range(2, owners + 1):
        if owners % ratio:
            continue
        for first in range(0, owners, ratio):
            for share in range(prefill.parts):
                held = [prefill.holders(owner * heads, total, share) for owner in range(first, first + ratio)]
                groups += [tuple(ranks[copy] for ranks in held) for copy in range(copies)]
    return groups


@dataclass(frozen=True)
class RankInfo:
    """What does not change of one rank of one engine while it runs."""

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
