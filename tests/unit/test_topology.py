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


@pytest.mark.parametrize(("tp", "heads"), FITTING)
def test_holders_are_the_owners(tp, heads):
    for head in range(heads):
        assert [*holders(head, tp, heads)] == [r for r in range(tp) if head in owned_heads(r, tp, heads)]
        assert len(holders(head, tp, heads)) == replicas(tp, heads)


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


@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp", "replica_hash", "writers"),
    [
        (4, 2, 2, 0, [(0,), (1,)]),
        (4, 4, 2, 0, [(0, 1), (2, 3)]),
        (4, 1, 2, 0, [(0,), (0,)]),
        (6, 3, 2, 0, [(0, 1), (1, 2)]),
        (2, 4, 1, 0, [(0, 2)]),
        (2, 4, 1, 1, [(1, 3)]),
        (2, 4, 1, 2, [(0, 2)]),
        (1, 4, 2, 3, [(2,), (3,)]),
        (2, 1, 4, 0, [(0,), (0,), (0,), (0,)]),
        (2, 4, 8, 1, [(0,), (1,)] * 2 + [(2,), (3,)] * 2),
        # As many replicas on both sides write one to one, whatever the hash; else those of a lane take turns.
        (1, 4, 4, 2, [(0,), (1,), (2,), (3,)]),
        (1, 4, 2, 2, [(0,), (1,)]),
        (1, 4, 6, 3, [(2,), (3,)] * 3),
    ],
)
def test_writers_to(heads, p_tp, d_tp, replica_hash, writers):
    assert [
        writers_to(d_rank, sharding(d_tp), sharding(p_tp), heads, replica_hash, False) for d_rank in range(d_tp)
    ] == writers


def test_ranks_that_exchange_heads_write_to_all_their_decode_ranks():
    """Of 6 heads, prefill's 3 ranks have 2 each and decode's 2 ranks 3: the middle one's are for both."""
    assert [writers_to(rank, sharding(2), sharding(3), 6, 0, True) for rank in range(2)] == [(0, 1, 2)] * 2
    assert [writers_to(rank, sharding(3), sharding(2), 6, 0, True) for rank in range(3)] == [(0, 1)] * 3


@pytest.mark.parametrize("heads", range(1, 9))
def test_each_head_has_one_writer(heads):
    """The writers hold, without overlap, all heads of the decode rank."""
    fitting = [tp for tp, h in FITTING if h == heads]
    for p_tp in fitting:
        for d_tp in fitting:
            for replica_hash in range(p_tp):
                for d_rank in range(d_tp):
                    needed = owned_heads(d_rank, d_tp, heads)
                    brought = [
                        head
                        for writer in writers_to(d_rank, sharding(d_tp), sharding(p_tp), heads, replica_hash, False)
                        for head in owned_heads(writer, p_tp, heads)
                        if head in needed
                    ]
                    assert brought == [*needed]


@pytest.mark.parametrize(("tp", "heads"), FITTING)
def test_replicas_take_turns(tp, heads):
    """Over as many consecutive hashes as there are replicas, every prefill rank writes exactly once."""
    hashes = range(replicas(tp, heads))
    turns = [rank for each in hashes for rank in writers_to(0, sharding(1), sharding(tp), heads, each, True)]
    assert sorted(turns) == [*range(tp)]


@pytest.mark.parametrize(
    ("tp", "heads", "groups"),
    [
        (1, 4, []),
        (2, 4, [(0, 1)]),
        (4, 4, [(0, 1), (2, 3), (0, 1, 2, 3)]),
        (4, 2, [(0, 2), (1, 3)]),
        (4, 1, []),
        (6, 6, [(0, 1), (2, 3), (4, 5), (0, 1, 2), (3, 4, 5), (0, 1, 2, 3, 4, 5)]),
        (8, 4, [(0, 2), (1, 3), (4, 6), (5, 7), (0, 2, 4, 6), (1, 3, 5, 7)]),
    ],
)
def test_regroup_groups(tp, heads, groups):
    assert regroup_groups(sharding(tp), heads) == groups


@pytest.mark.parametrize(("tp", "heads"), FITTING)
def test_a_group_holds_neighbouring_heads_in_order(tp, heads):
    groups = regroup_groups(sharding(tp), heads)
    assert len(set(groups)) == len(groups)
    for group in groups:
        held = [head for rank in group for head in owned_heads(rank, tp, heads)]
        assert held == [*range(held[0], held[0] + len(held))]
        assert held[0] % len(held) == 0


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
    ("dealt", "heads", "replicas", "holders"),
    [
        (sharding(4), 1, 4, {(0, 0): (0, 1, 2, 3)}),
        (sharding(4, dcp=2), 1, 2, {(0, 0): (0, 2), (0, 1): (1, 3)}),
        (sharding(4, dcp=2), 2, 1, {(0, 0): (0,), (0, 1): (1,), (1, 0): (2,), (1, 1): (3,)}),
        (sharding(2, pcp=2), 2, 1, {(0, 0): (0,), (0, 1): (2,), (1, 0): (1,), (1, 1): (3,)}),
        (sharding(2, pcp=2), 1, 2, {(0, 0): (0, 1), (0, 1): (2, 3)}),
        (Sharding(2, (0, 0, 0, 0)), 2, 2, {(0, 0): (0, 2), (1, 0): (1, 3)}),  # prefill ranks that hold copies
    ],
)
def test_replicas_hold_the_same_heads_of_the_same_tokens(dealt, heads, replicas, holders):
    assert dealt.replicas(heads) == replicas
    for (head, share), ranks in holders.items():
        assert dealt.holders(head, heads, share) == ranks
        assert [dealt.replica_index(rank, heads) for rank in ranks] == [*range(replicas)]


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


@pytest.mark.parametrize(
    ("heads", "prefill", "decode", "replica_hash", "writers"),
    [
        (1, sharding(2, dcp=2, interleave=16), sharding(1), 0, [(0, 1)]),
        (1, sharding(4, dcp=2, interleave=16), sharding(1), 0, [(0, 1)]),
        (1, sharding(4, dcp=2, interleave=16), sharding(1), 1, [(2, 3)]),
        (1, sharding(2), sharding(2, dcp=2, interleave=16), 1, [(1,), (1,)]),
        # Shares that have no token in common: the others need not be waited for.
        (1, sharding(2, dcp=2, interleave=16), sharding(2, dcp=2, interleave=16), 0, [(0,), (1,)]),
        (1, sharding(4, dcp=4, interleave=16), sharding(2, dcp=2, interleave=16), 0, [(0, 2), (1, 3)]),
        (1, sharding(2, dcp=2, interleave=16), sharding(2, dcp=2, interleave=8), 0, [(0, 1), (0, 1)]),
        (4, sharding(2, pcp=2, interleave=16), sharding(1), 0, [(0, 1, 2, 3)]),
        (4, sharding(2, pcp=2, interleave=16), sharding(2), 0, [(0, 2), (1, 3)]),
        (2, sharding(1, pcp=2, interleave=16), sharding(4, dcp=2, interleave=16), 0, [(0,), (1,), (0,), (1,)]),
    ],
)
def test_writers_hold_tokens_of_the_decode_ranks(heads, prefill, decode, replica_hash, writers):
    assert [writers_to(rank, decode, prefill, heads, replica_hash, True) for rank in range(decode.tp)] == writers


def test_ranks_that_exchange_heads_hold_the_same_tokens():
    assert regroup_groups(sharding(2, pcp=2), 4) == [(0, 1), (2, 3)]
    assert regroup_groups(sharding(4, dcp=2), 2) == [(0, 2), (1, 3)]
    assert regroup_groups(Sharding(2, (0, 0, 0, 0)), 4) == [(0, 1), (2, 3)]
    assert regroup_groups(sharding(4, dcp=4), 1) == []


@pytest.mark.parametrize("sizes", [(0,), (2, 0), (2, 2, 0), (2, 2, 16, 0), (2, -2)])
def test_sizes_below_one(sizes):
    with pytest.raises(TopologyError, match="parallel sizes"):
        sharding(*sizes)
