# SPDX-License-Identifier: Apache-2.0
"""Real torch tensors, laid out as vLLM and vllm-ascend lay out their caches, and what is read off them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.layout import (
    ALL_TOKENS,
    Geometry,
    LayerSpec,
    LayoutError,
    Order,
    TokenShare,
    block_geometry,
)
from vllm_ascend_pd.core.plan import make_mapping
from vllm_ascend_pd.core.topology import sharding


@dataclass(frozen=True)
class Cache:
    """A cache tensor and what its engine says of it."""

    tensor: torch.Tensor
    block_size: int
    heads: int
    heads_first: bool
    total_heads: int = 8

    def geometry(self) -> Geometry:
        tensor, spec = self.tensor, LayerSpec(0, self.block_size, self.heads, self.total_heads)
        sizes = (tensor.shape, tensor.stride(), tensor.element_size())
        return block_geometry(*sizes, str(tensor.dtype), spec, heads_first=self.heads_first)


HEAD_MAJOR, TOKEN_MAJOR = Order.HEAD_MAJOR, Order.TOKEN_MAJOR


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        (Cache(torch.empty(5, 16, 256), 16, 2, True), "expected 4 dimensions"),
        (Cache(torch.empty(2, 5, 16, 2, 64), 16, 2, True), "expected 4 dimensions"),
        (Cache(torch.empty(5, 2, 32, 128), 16, 2, True), "no dimensions of 2 heads and 16 tokens"),
        (Cache(torch.empty(5, 4, 16, 128), 16, 2, True), "no dimensions of 2 heads and 16 tokens"),
        (Cache(torch.empty(5, 16, 4, 128), 16, 2, False), "no dimensions of 2 heads and 16 tokens"),
        (Cache(torch.empty(5, 16, 2, 128)[..., :64], 16, 2, False), "not one run of bytes"),
        (Cache(torch.empty(5, 16, 4, 64)[:, :, :2], 16, 2, False), "not one run of bytes"),
        (Cache(torch.empty(5, 32, 2, 64)[:, ::2], 16, 2, False), "not one run of bytes"),
        (Cache(torch.empty(5, 16, 2, 128)[..., ::2], 16, 2, False), "not one run of bytes"),
        (
            Cache(torch.empty(20000).as_strided((5, 16, 2, 64), (2048, 128, 64, 2)), 16, 2, False),
            "not one run of bytes",
        ),
        (Cache(torch.empty(5, 2, 128, 16).transpose(2, 3), 16, 2, True), "not one run of bytes"),
        (Cache(torch.empty(2, 5, 16, 64).transpose(0, 1), 16, 2, True), "not one run of bytes"),
        (Cache(torch.empty(16, 5, 2, 64).transpose(0, 1), 16, 2, False), "not one run of bytes"),
        (Cache(torch.empty(2, 16, 64).expand(5, 2, 16, 64), 16, 2, True), "not one run of bytes"),
        (
            Cache(torch.empty(20000).as_strided((5, 16, 2, 64), (2047, 128, 64, 1)), 16, 2, False),  # blocks overlap
            "not one run of bytes",
        ),
    ],
)
def test_what_is_refused(cache, complaint):
    with pytest.raises(LayoutError, match=complaint):
        cache.geometry()


@given(
    num_blocks=st.integers(2, 4),
    block_size=st.integers(1, 6),
    heads=st.integers(1, 6),
    content=st.integers(1, 4),
    itemsize=st.sampled_from([1, 2, 4]),
    gap=st.sampled_from([0, 0, 3]),
    head_major=st.booleans(),
    heads_first=st.booleans(),
)
def test_each_element_lies_where_the_geometry_says(
    num_blocks, block_size, heads, content, itemsize, gap, head_major, heads_first
):
    """Any order in memory, seen in any logical order."""
    in_memory = (heads, block_size, content) if head_major else (block_size, heads, content)
    stride = block_size * heads * content + gap
    tensor = torch.empty(num_blocks * stride).as_strided(
        (num_blocks, *in_memory), (stride, *torch.empty(in_memory).stride())
    )
    if heads_first != head_major:
        tensor = tensor.transpose(1, 2)
    spec = LayerSpec(3, block_size, heads, heads)
    geometry = block_geometry(tensor.shape, tensor.stride(), itemsize, "x", spec, heads_first=heads_first)
    assert (geometry.group, geometry.dtype) == (3, "x")
    assert geometry.block_bytes == block_size * heads * content * itemsize
    assert geometry.block_stride == stride * itemsize
    head_dim, token_dim = (1, 2) if heads_first else (2, 1)
    if geometry.order is Order.HEAD_MAJOR:
        head_step, token_step = block_size * geometry.head_bytes, geometry.head_bytes
    else:
        head_step, token_step = geometry.head_bytes, geometry.entry_bytes
    block, head, token = np.meshgrid(np.arange(num_blocks), np.arange(heads), np.arange(block_size))
    np.testing.assert_array_equal(
        block * geometry.block_stride + head * head_step + token * token_step,
        itemsize * (block * tensor.stride(0) + head * tensor.stride(head_dim) + token * tensor.stride(token_dim)),
    )


# --- context parallelism -------------------------------------------------------------------------------------


@st.composite
def token_shares(draw: st.DrawFn) -> TokenShare:
    ranks = draw(st.integers(1, 5))
    return TokenShare(ranks, draw(st.integers(0, ranks - 1)), draw(st.integers(1, 6)))


@given(token_shares(), token_shares())
def test_shares_that_meet_have_a_token_in_common(one, other):
    tokens = np.arange(np.lcm(one.ranks * one.interleave, other.ranks * other.interleave))
    held = [tokens // share.interleave % share.ranks == share.rank for share in (one, other)]
    assert one.meets(other) == other.meets(one) == bool(np.any(held[0] & held[1]))


def test_shares_that_cannot_be():
    with pytest.raises(LayoutError, match="share 2 of tokens that are shared by 2 ranks"):
        TokenShare(2, 2, 16)
    with pytest.raises(LayoutError, match="blocks of 16 tokens, interleaved by 24"):
        Geometry(0, TOKEN_MAJOR, "bfloat16", 16, 4096, 2, 8, 128, share=TokenShare(2, 1, 24))


# --- caches with one entry for several tokens --------------------------------------------------------------------

WIDTH = 3  # bytes of an entry


def geometry(entries: int, ratio: int, share: TokenShare = ALL_TOKENS) -> Geometry:
    spec = LayerSpec(0, entries * ratio, 1, 1, share=share, tokens_per_entry=ratio)
    strides = (entries * WIDTH, WIDTH, WIDTH, 1)
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
        make_mapping(geometry(4, 4), 0, sharding(1), sharding(1), 6)
