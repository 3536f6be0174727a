# SPDX-License-Identifier: Apache-2.0
"""Who owns which heads, and who writes to whom, for every size that vLLM allows."""

import pytest

from vllm_ascend_pd.core.layout import ALL_TOKENS, TokenShare
from vllm_ascend_pd.core.topology import (
    Sharding,
    TopologyError,
    holders,
    owned_heads,
    regroup_groups,
    replicas,
    sharding,
    writers_to,
)

MAX = 16
FITTING = [(tp, heads) for tp in range(1, MAX + 1) for heads in range(1, MAX + 1) if tp % heads == 0 or heads % tp == 0]
NOT_FITTING = [pair for pair in ((tp, heads) for tp in range(1, MAX) for heads in range(1, MAX)) if pair not in FITTING]


@pytest.mark.parametrize(("tp", "heads"), FITTING)
def test_heads_are_dealt_out_as_in_vllm(tp, heads):
    """vLLM: max(1, heads // tp) heads a rank; of replicated heads, rank r loads shard r // (tp // heads)."""
    for rank in range(tp):
        owned = owned_heads(rank, tp, heads)
        assert len(owned) == max(1, heads // tp)
        assert owned.start == (rank // (tp // heads) if tp >= heads else rank * (heads // tp))


@pytest.mark.parametrize(("tp", "heads"), [*NOT_FITTING, (0, 1), (1, 0), (-1, 2), (2, -1)])
def test_sizes_that_do_not_fit(tp, heads):
    for use in (
        lambda: replicas(tp, heads),
        lambda: owned_heads(0, tp, heads),
        lambda: holders(0, tp, heads),
        lambda: regroup_groups(sharding(tp), heads),
        lambda: writers_to(0, sharding(tp), sharding(1), heads, 0, True),
        lambda: writers_to(0, sharding(1), sharding(tp), heads, 0, True),
    ):
        with pytest.raises(TopologyError):
            use()


@pytest.mark.parametrize(("tp", "heads"), FITTING)
def test_replicas_take_turns(tp, heads):
    """Over as many consecutive hashes as there are replicas, every prefill rank writes exactly once."""
    hashes = range(replicas(tp, heads))
    turns = [rank for each in hashes for rank in writers_to(0, sharding(1), sharding(tp), heads, each, True)]
    assert sorted(turns) == [*range(tp)]


# --- context parallelism -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "dcp", "pcp", "shares"),
    [
        (4, 1, 1, (0, 0, 0, 0)),
        (4, 2, 1, (0, 1, 0, 1)),
        (4, 4, 1, (0, 1, 2, 3)),
        (2, 1, 2, (0, 0, 1, 1)),
        (2, 2, 2, (0, 1, 2, 3)),
        (4, 2, 2, (0, 1, 0, 1, 2, 3, 2, 3)),
    ],
)
def test_tokens_are_dealt_out_as_in_vllm(tp, dcp, pcp, shares):
    """vLLM: `pcp_rank * dcp + dcp_rank`; decode's groups are neighbours, prefill's ranks are `tp` apart."""
    sharding_ = sharding(tp, dcp, 16, pcp)
    assert sharding_.shares == shares
    for rank, index in enumerate(shares):
        assert sharding_.share(rank) == (TokenShare(dcp * pcp, index, 16) if dcp * pcp > 1 else ALL_TOKENS)


@pytest.mark.parametrize(
    ("dealt", "heads"),
    [
        (sharding(4, dcp=2), 4),  # no two ranks hold the same heads
        (sharding(12, dcp=4), 2),  # a group of 4 among 6 ranks
        (Sharding(2, (0, 0, 1)), 1),  # half a tensor-parallel group
        (Sharding(2, (0, 2)), 1),  # a share that nobody holds
        (Sharding(4, (0, 0, 0, 1)), 1),
        (Sharding(1, (2**31 - 1,)), 1),
    ],
)
@pytest.mark.timeout(10)
def test_tokens_that_are_not_shared_evenly(dealt, heads):
    for use in (
        lambda: dealt.replicas(heads),
        lambda: regroup_groups(dealt, heads),
        lambda: writers_to(0, sharding(1), dealt, heads, 0, True),
    ):
        with pytest.raises(TopologyError):
            use()


@pytest.mark.parametrize("sizes", [(0,), (2, 0), (2, 2, 0), (2, 2, 16, 0), (2, -2)])
def test_sizes_below_one(sizes):
    with pytest.raises(TopologyError, match="parallel sizes"):
        sharding(*sizes)
