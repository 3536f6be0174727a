# SPDX-License-Identifier: Apache-2.0
"""Caches with one entry for several tokens, against a model that moves them entry by entry."""

from types import SimpleNamespace

import pytest

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
from vllm_ascend_pd.core.plan import make_route
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.ticket import TicketError, parse_ticket
from vllm_ascend_pd.core.topology import sharding

WIDTH = 3  # bytes of an entry


def geometry(entries: int, ratio: int, padding: int = 0, share: TokenShare | None = None) -> Geometry:
    spec = LayerSpec(0, entries * ratio, 1, 1, share=share or ALL_TOKENS, tokens_per_entry=ratio)
    strides = (entries * WIDTH + padding, WIDTH, WIDTH, 1)
    return block_geometry((9, entries, 1, WIDTH), strides, 1, "uint8", spec, heads_first=False)


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
