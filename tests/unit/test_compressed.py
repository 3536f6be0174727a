# SPDX-License-Identifier: Apache-2.0
"""Caches with one entry for several tokens, against a model that moves them entry by entry."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.layout import (
    ALL_TOKENS,
    CacheTensor,
    Geometry,
    LayerSpec,
    LayoutError,
    Order,
    RankCaches,
    TokenShare,
    block_geometry,
)
from vllm_ascend_pd.core.plan import Units, descriptors, make_route
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.ticket import TicketError, parse_ticket
from vllm_ascend_pd.core.topology import sharding

WIDTH = 3  # bytes of an entry


def geometry(entries: int, ratio: int, padding: int = 0, share: TokenShare | None = None) -> Geometry:
    spec = LayerSpec(0, entries * ratio, 1, 1, share=share or ALL_TOKENS, tokens_per_entry=ratio)
    strides = (entries * WIDTH + padding, WIDTH, WIDTH, 1)
    return block_geometry((9, entries, 1, WIDTH), strides, 1, "uint8", spec, heads_first=False)


@given(
    ratio=st.sampled_from([1, 4, 128]),
    p_entries=st.sampled_from([2, 4, 8]),
    d_entries=st.sampled_from([2, 4, 16]),
    padding=st.integers(0, 5),
    tp=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (4, 4)]),
    cached=st.integers(0, 2),
    rest=st.integers(1, 700),
    steps=st.integers(1, 3),
)
def test_complete_entries_arrive_and_nothing_else(
    ratio: int,
    p_entries: int,
    d_entries: int,
    padding: int,
    tp: tuple[int, int],
    cached: int,
    rest: int,
    steps: int,
) -> None:
    p, d = geometry(p_entries, ratio, padding), geometry(d_entries, ratio)
    align = math.lcm(p.span, d.span)
    length = cached * align + rest
    whole = length // ratio  # entries of the prompt
    p_group, d_group = (TokenGroup(g.span, tokens_per_entry=ratio) for g in (p, d))
    p_ids = [2 * n + 1 for n in range(-(-whole // p_entries))]  # no more than vllm-ascend allocates
    d_ids = [3 * n + 2 for n in range(-(-whole // d_entries))][::-1]
    assert d_group.ticket_blocks(d_ids, length) == d_ids
    assert d_group.ticket_blocks([*d_ids, 1], length) == d_ids  # vLLM allocates one more if an entry is unfinished
    source = np.random.default_rng(1).integers(1, 255, (2 * len(p_ids) + 2) * p.block_stride, dtype=np.uint8)
    arrived = np.zeros((3 * len(d_ids) + 3) * d.block_stride, dtype=np.uint8)
    reached: set[int] = set()
    for rank in range(tp[0]):
        route = make_route(p, rank, sharding(tp[0]), sharding(tp[1]), d.block_size)
        start = cached * align
        for step in range(steps):
            last = step == steps - 1
            stop = length if last else min(length, start + rest // steps) // align * align
            stop = max(stop, start)
            units = Units.of(route.unit, [(start, p.complete(stop))])
            src = units.offsets(units.blocks([p_group.holding(p_ids, start, stop, last)], [start // p.span], p.span), p)
            dst = units.offsets(units.blocks([d_group.holding(d_ids, start, stop, last)], [start // d.span], d.span), d)
            reached |= {target.tp_rank for target in route.targets}
            copies = descriptors(route.targets[0], src, dst)
            for a, b, n in zip(copies.src, copies.dst, copies.nbytes, strict=True):
                assert b + n <= arrived.size
                assert a + n <= source.size
                arrived[b : b + n] = source[a : a + n]
            start = stop
    assert reached == set(range(tp[1]))
    for entry in range(cached * align // ratio, whole):
        a = p_ids[entry // p_entries] * p.block_stride + entry % p_entries * WIDTH
        b = d_ids[entry // d_entries] * d.block_stride + entry % d_entries * WIDTH
        assert (arrived[b : b + WIDTH] == source[a : a + WIDTH]).all()
    named = set(d_ids)
    outside = [arrived[n * d.block_stride :][: d.block_stride].any() for n in range(3 * len(d_ids) + 3)]
    assert {n for n, touched in enumerate(outside) if touched} <= named


def test_an_entry_does_not_cross_blocks_or_shares() -> None:
    with pytest.raises(LayoutError, match="blocks of 6 tokens, with an entry for 4 of them"):
        Geometry(0, Order.TOKEN_MAJOR, "uint8", 6, 64, 1, 1, 4, tokens_per_entry=4)
    with pytest.raises(LayoutError, match="context parallelism with caches that keep one entry for 4 tokens"):
        geometry(4, 4, share=TokenShare(2, 0, 16))
    spec = LayerSpec(0, 16, 1, 1, tokens_per_entry=4)
    with pytest.raises(LayoutError, match="no dimensions of 1 heads and 4 entries of 4 tokens"):
        block_geometry((9, 16, 1, 3), (48, 3, 3, 1), 1, "uint8", spec, heads_first=False)
    with pytest.raises(LayoutError, match="decode's blocks are of 6 tokens, prefill has an entry for 4 tokens"):
        make_route(geometry(4, 4), 0, sharding(1), sharding(1), 6)


def test_a_peer_with_another_compression_is_refused_with_both_sides_named() -> None:
    def caches(entries: int, ratio: int) -> RankCaches:
        return RankCaches((geometry(entries, ratio),), (CacheTensor("layer.2", 0, 4096, 9, 0),))

    def decode(of: RankCaches) -> EngineDescription:
        rank = SimpleNamespace(pp_rank=0, tp_rank=0, caches=of)
        return EngineDescription("decode", "model", 1, 1, (rank,))  # type: ignore[arg-type]

    assert mismatch(caches(8, 4), "model", 0, sharding(1), True, decode(caches(16, 4))) is None
    reason = mismatch(caches(8, 4), "model", 0, sharding(1), True, decode(caches(8, 8)))
    assert reason == "layer.2: tokens_per_entry is 4 on prefill, 8 on decode"


def test_a_ticket_names_blocks_for_complete_entries() -> None:
    params = {
        "request_id": "r",
        "remote_engine_id": "d",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_tp_size": 1,
        "remote_cached_tokens": 0,
        "ticket_id": 32 * "0",
        "num_tokens": 19,
    }
    params |= {"remote_block_ids": [[5], [1, 2]], "remote_block_size": [16, 16]}
    assert parse_ticket(params, 19, 2, tokens_per_entry={0: 4}).remote_block_ids == [[5], [1, 2]]
    with pytest.raises(TicketError, match="remote_block_ids: 1 blocks of 16 for 19 tokens"):
        parse_ticket(params, 19, 2, tokens_per_entry={0: 2})
    with pytest.raises(TicketError, match="remote_block_size 16 in group 1, which has an entry for 32 tokens"):
        parse_ticket(params, 19, 2, tokens_per_entry={0: 4, 1: 32})
