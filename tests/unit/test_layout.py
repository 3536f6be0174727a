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
    CacheTensor,
    Geometry,
    LayerSpec,
    LayoutError,
    Order,
    RankCaches,
    TokenShare,
    block_geometry,
)

BF16 = torch.bfloat16


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


def heads_within_tokens(num_blocks: int, heads: int, block_size: int, content: int) -> torch.Tensor:
    """vLLM's LBNHC: the logical shape `[block, head, token, content]` over token-major memory."""
    return torch.empty(num_blocks, block_size, heads, content, dtype=BF16).permute(0, 2, 1, 3)


def padded(num_blocks: int, *block: int, block_stride: int) -> torch.Tensor:
    """Blocks further apart than they are long, as where layers share a page."""
    flat = torch.empty(num_blocks * block_stride, dtype=BF16)
    inner = torch.empty(block).stride()
    return flat.as_strided((num_blocks, *block), (block_stride, *inner))


VLLM_CPU = Cache(torch.empty(5, 2, 16, 128, dtype=BF16), 16, 2, heads_first=True)
VLLM_CPU_FLOAT32 = Cache(torch.empty(5, 2, 16, 128, dtype=torch.float32), 16, 2, heads_first=True)
VLLM_CPU_ONE_HEAD = Cache(torch.empty(5, 1, 16, 128, dtype=BF16), 16, 1, heads_first=True)
VLLM_CPU_HEADS_AS_MANY_AS_TOKENS = Cache(torch.empty(5, 16, 16, 128, dtype=BF16), 16, 16, True, 16)
VLLM_LBNHC = Cache(heads_within_tokens(5, 2, 16, 128), 16, 2, heads_first=True)
VLLM_LBNHC_ONE_HEAD = Cache(heads_within_tokens(5, 1, 16, 128), 16, 1, heads_first=True)
VLLM_LBNHC_HEADS_AS_MANY_AS_TOKENS = Cache(heads_within_tokens(5, 16, 16, 128), 16, 16, True, 16)
VLLM_CPU_PADDED = Cache(padded(5, 2, 16, 128, block_stride=5000), 16, 2, heads_first=True)
ASCEND = Cache(torch.empty(5, 128, 2, 64, dtype=BF16), 128, 2, heads_first=False)
ASCEND_ONE_HEAD = Cache(torch.empty(5, 128, 1, 64, dtype=BF16), 128, 1, heads_first=False)
ASCEND_HEADS_AS_MANY_AS_TOKENS = Cache(torch.empty(5, 16, 16, 64, dtype=BF16), 16, 16, False, 16)
ASCEND_PADDED = Cache(padded(5, 128, 2, 64, block_stride=20000), 128, 2, heads_first=False)
ASCEND_MLA_LATENT = Cache(torch.empty(5, 128, 1, 512, dtype=BF16), 128, 1, False, 1)
ASCEND_MLA_ROPE = Cache(torch.empty(5, 128, 1, 64, dtype=BF16), 128, 1, False, 1)
ASCEND_INT8 = Cache(torch.empty(5, 128, 2, 64, dtype=torch.int8), 128, 2, heads_first=False)

HEAD_MAJOR, TOKEN_MAJOR = Order.HEAD_MAJOR, Order.TOKEN_MAJOR


@pytest.mark.parametrize(
    ("name", "order", "block_stride", "head_bytes"),
    [
        ("VLLM_CPU", HEAD_MAJOR, 8192, 256),
        ("VLLM_CPU_FLOAT32", HEAD_MAJOR, 16384, 512),
        ("VLLM_CPU_ONE_HEAD", HEAD_MAJOR, 4096, 256),
        ("VLLM_CPU_HEADS_AS_MANY_AS_TOKENS", HEAD_MAJOR, 65536, 256),
        ("VLLM_LBNHC", TOKEN_MAJOR, 8192, 256),
        ("VLLM_LBNHC_ONE_HEAD", TOKEN_MAJOR, 4096, 256),
        ("VLLM_LBNHC_HEADS_AS_MANY_AS_TOKENS", TOKEN_MAJOR, 65536, 256),
        ("VLLM_CPU_PADDED", HEAD_MAJOR, 10000, 256),
        ("ASCEND", TOKEN_MAJOR, 32768, 128),
        ("ASCEND_ONE_HEAD", TOKEN_MAJOR, 16384, 128),
        ("ASCEND_HEADS_AS_MANY_AS_TOKENS", TOKEN_MAJOR, 32768, 128),
        ("ASCEND_PADDED", TOKEN_MAJOR, 40000, 128),
        ("ASCEND_MLA_LATENT", TOKEN_MAJOR, 131072, 1024),
        ("ASCEND_MLA_ROPE", TOKEN_MAJOR, 16384, 128),
        ("ASCEND_INT8", TOKEN_MAJOR, 16384, 64),
    ],
)
def test_caches_of_vllm_and_vllm_ascend(name, order, block_stride, head_bytes):
    cache: Cache = globals()[name]
    geometry = cache.geometry()
    assert geometry == Geometry(
        group=0,
        order=order,
        dtype=str(cache.tensor.dtype),
        block_size=cache.block_size,
        block_stride=block_stride,
        heads=cache.heads,
        total_heads=cache.total_heads,
        head_bytes=head_bytes,
    )
    assert geometry.entry_bytes == cache.heads * head_bytes
    assert geometry.block_bytes == cache.tensor[0].nbytes <= block_stride


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


@pytest.mark.parametrize("stride", [0, 1, 7, 4096])
def test_the_stride_of_a_single_head_or_token_does_not_matter(stride):
    flat = torch.empty(20000)
    one_head = Cache(flat.as_strided((5, 16, 1, 64), (1024, 64, stride, 1)), 16, 1, heads_first=False).geometry()
    one_token = Cache(flat.as_strided((5, 16, 1, 64), (1024, 64, stride, 1)), 1, 16, heads_first=True).geometry()
    assert (one_head.block_bytes, one_head.entry_bytes) == (4096, 256)
    assert (one_token.block_bytes, one_token.entry_bytes) == (4096, 4096)


def test_rank_caches_are_found_by_name():
    k, v = ASCEND.geometry(), ASCEND_MLA_ROPE.geometry()
    caches = RankCaches(
        (k, v),
        (
            CacheTensor("model.layers.0", 0, 1000, 5, 0),
            CacheTensor("model.layers.0", 1, 2000, 5, 1),
            CacheTensor("model.layers.1", 0, 3000, 5, 0),
        ),
    )
    assert caches.by_name() == {("model.layers.0", 0): 0, ("model.layers.0", 1): 1, ("model.layers.1", 0): 2}
    assert [caches.geometry_of(tensor) for tensor in caches.tensors] == [k, v, k]


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


@pytest.mark.parametrize(
    ("share", "span", "run"), [(ALL_TOKENS, 16, 16), (TokenShare(2, 1, 16), 32, 16), (TokenShare(4, 3, 2), 64, 2)]
)
def test_a_block_id_stands_for_a_block_on_each_rank(share, span, run):
    geometry = Geometry(0, TOKEN_MAJOR, "bfloat16", 16, 4096, 2, 8, 128, share=share)
    assert (geometry.span, geometry.run, geometry.block_bytes) == (span, run, 4096)


def test_shares_that_cannot_be():
    with pytest.raises(LayoutError, match="share 2 of tokens that are shared by 2 ranks"):
        TokenShare(2, 2, 16)
    with pytest.raises(LayoutError, match="blocks of 16 tokens, interleaved by 24"):
        Geometry(0, TOKEN_MAJOR, "bfloat16", 16, 4096, 2, 8, 128, share=TokenShare(2, 1, 24))
