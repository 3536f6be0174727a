# SPDX-License-Identifier: Apache-2.0
"""Which KV heads and tokens a rank owns, and who writes to whom.

Heads are dealt out as vLLM does it: with `tp <= total` each rank owns `total / tp` neighbouring heads; with
`tp > total` each head is held by `tp / total` neighbouring ranks (replicas). With context parallelism ranks that
hold the same heads share the tokens; those of equal heads and tokens are what is left of the replicas.
"""

import functools
from collections import Counter
from typing import Annotated

import msgspec

from vllm_ascend_pd.core.layout import ALL_TOKENS, TokenShare


class TopologyError(ValueError):
    """Parallel sizes that do not fit a number of KV heads, or each other."""


def replicas(tp: int, total: int) -> int:
    """How many of `tp` ranks hold the same heads."""
    if tp < 1 or total < 1 or (tp % total and total % tp):
        raise TopologyError(f"tensor parallel size {tp} and {total} KV heads: neither divides the other")
    return max(1, tp // total)


def owned_heads(rank: int, tp: int, total: int) -> range:
    """The heads, numbered over the whole model, that `rank` of `tp` holds."""
    copies = replicas(tp, total)
    count = max(1, total // tp)
    first = (rank // copies) * count
    return range(first, first + count)


def holders(head: int, tp: int, total: int) -> range:
    """The ranks of `tp` that hold `head`."""
    copies = replicas(tp, total)
    count = max(1, total // tp)
    first = (head // count) * copies
    return range(first, first + copies)


class Sharding(msgspec.Struct, frozen=True, array_like=True):
    """How the ranks of a pipeline stage share its KV.

    Rank `r` of a stage is tensor-parallel rank `r % tp`, which says what heads it holds, and prefill-context-parallel
    rank `r // tp`; `shares[r]` is its share of the tokens, which are interleaved as `TokenShare` says.
    """

    tp: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    shares: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(min_length=1)]
    interleave: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] = 1

    @property
    def parts(self) -> int:
        """Into how many shares tokens are divided."""
        return max(self.shares, default=0) + 1

    def share(self, rank: int) -> TokenShare:
        return self.part(self.shares[rank])

    def part(self, index: int) -> TokenShare:
        parts = self.parts
        return TokenShare(parts, index, self.interleave) if parts > 1 else ALL_TOKENS

    def heads(self, rank: int, total: int) -> range:
        """The heads, numbered over the whole model, that `rank` holds."""
        return owned_heads(rank % self.tp, self.tp, total)

    def replicas(self, total: int) -> int:
        """How many ranks hold the same heads of the same tokens."""
        copies = replicas(self.tp, total)
        counts = Counter((rank % self.tp // copies, share) for rank, share in enumerate(self.shares))
        if len(self.shares) % self.tp or len(counts) != self.tp // copies * self.parts or len({*counts.values()}) > 1:
            raise TopologyError(
                f"{len(self.shares)} ranks with tensor parallel size {self.tp} do not all share the tokens of "
                f"{total} KV heads by {self.parts}: the {copies} ranks that hold the same heads must divide evenly"
            )
        return counts[0, 0]

    def holders(self, head: int, total: int, share: int) -> tuple[int, ...]:
        """The ranks that hold `head` of the tokens in `share`, ascending."""
        owners = holders(head, self.tp, total)
        return tuple(rank for rank, held in enumerate(self.shares) if held == share and rank % self.tp in owners)

    def replica_index(self, rank: int, total: int) -> int:
        """Returns the place of `rank` among the ranks that hold the same heads and tokens."""
        return self.holders(self.heads(rank, total).start, total, self.shares[rank]).index(rank)


@functools.lru_cache(maxsize=1024)
def sharding(tp: int, dcp: int = 1, interleave: int = 1, pcp: int = 1) -> Sharding:
    """As vLLM 0.23 and vllm-ascend divide tokens: decode context parallelism (`dcp`) among neighbouring
    tensor-parallel ranks, times prefill context parallelism (`pcp`), which multiplies the ranks."""
    if min(tp, dcp, interleave, pcp) < 1:
        raise TopologyError(f"parallel sizes: tp {tp}, dcp {dcp}, pcp {pcp}, interleaved by {interleave}")
    shares = tuple(pcp_rank * dcp + tp_rank % dcp for pcp_rank in range(pcp) for tp_rank in range(tp))
    return Sharding(tp, shares, interleave if dcp * pcp > 1 else 1)


def writers_to(d_rank: int, decode: Sharding, prefill: Sharding, total: int, replica_hash: int) -> tuple[int, ...]:
    """Returns the prefill ranks that write to decode's `d_rank`, ascending.

    They are those that hold some of its heads and of its tokens, in a prompt that is long enough. One that has none
    of a short prompt's tokens still reports. Where several prefill ranks hold the same heads and tokens,
    `Ticket.replica_hash` picks one of them, so that requests spread over them.
    """
    replica_index = replica_hash % prefill.replicas(total)
    heads = decode.heads(d_rank, total)
    wanted = decode.share(d_rank)
    shares = [share for share in range(prefill.parts) if prefill.part(share).meets(wanted)]
    return tuple(sorted({prefill.holders(head, total, share)[replica_index] for head in heads for share in shares}))


def regroup_groups(prefill: Sharding, total: int) -> list[tuple[int, ...]]:
    """Every set of prefill ranks that may have to exchange heads with an all-to-all, whatever decode's size.

    There is one group per ratio that divides the ranks holding different heads, per share of the tokens, and per
    replica. Ranks in a group are in the order of their heads. The list is the same on every rank, as creating
    process groups requires.
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
