# SPDX-License-Identifier: Apache-2.0
"""Which KV heads a tensor-parallel rank owns, and who writes to whom.

Heads are dealt out as vLLM does it: with `tp <= total` each rank owns `total / tp` neighbouring heads; with
`tp > total` each head is held by `tp / total` neighbouring ranks (replicas).
"""


class TopologyError(ValueError):
    """A tensor-parallel size that does not fit a number of KV heads."""


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


def writers_to(d_rank: int, d_tp: int, p_tp: int, total: int, salt: int) -> tuple[int, ...]:
    """The prefill ranks that write to decode rank `d_rank`, ascending.

    Where several prefill ranks hold the same heads, `salt` (a number drawn from the ticket) picks which of
    them serves this request, so that the load spreads over requests.
    """
    lane = salt % replicas(p_tp, total)
    return tuple(sorted({holders(head, p_tp, total)[lane] for head in owned_heads(d_rank, d_tp, total)}))


def regroup_groups(tp: int, total: int) -> list[tuple[int, ...]]:
    """Every set of prefill ranks that may have to exchange heads with an all-to-all, whatever decode's size.

    One group per ratio that divides the ranks holding different heads, per lane of replicas; the list is the
    same on every rank, as creating process groups requires. Ranks in a group are in the order of their heads.
    """
    copies = replicas(tp, total)
    owners = tp // copies
    groups = []
    for ratio in range(2, owners + 1):
        if owners % ratio:
            continue
        for first in range(0, owners, ratio):
            for lane in range(copies):
                groups.append(tuple(owner * copies + lane for owner in range(first, first + ratio)))
    return groups
