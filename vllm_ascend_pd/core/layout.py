# SPDX-License-Identifier: Apache-2.0
"""How one rank's KV cache lies in memory."""

import enum
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

# Descriptions come from other engines: whatever passes fits offset arithmetic (an id times a size below 2**62).
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
_Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LayoutError(ValueError):
    """A cache tensor whose memory layout this package cannot describe, or two that do not fit together."""


class Order(enum.Enum):
    """What varies slowest inside a block.

    HEAD_MAJOR: each head's part of a block is one run of bytes, opaque to us (vLLM's CPU backend packs K and
    V inside it in an order that depends on the instruction set): it is moved whole or not at all.
    TOKEN_MAJOR: each token's heads are one run of bytes (vllm-ascend).
    """

    HEAD_MAJOR = "head_major"
    TOKEN_MAJOR = "token_major"


class BlockKind(enum.Enum):
    """What a block holds: some tokens' KV, or a request's state after some token (`core/states.py`), which then
    counts as one token."""

    TOKENS = "tokens"
    STATE = "state"


class TokenShare(msgspec.Struct, frozen=True):
    """Which of a request's tokens a rank holds: all, or with context parallelism those of one of `ranks` ranks.

    Tokens are dealt out in runs of `interleave` (vLLM's `cp_kv_cache_interleave_size`): run `n` is on rank
    `n % ranks`. A block id stands for a block on each of these ranks.
    """

    ranks: _Size = 1
    rank: _Index = 0
    interleave: _Size = 1

    def __post_init__(self) -> None:
        if self.rank >= self.ranks:
            raise LayoutError(f"share {self.rank} of tokens that are shared by {self.ranks} ranks")

    def meets(self, other: "TokenShare") -> bool:
        """Whether there are tokens in both shares, in a prompt long enough."""
        # Runs of the two begin at `start + any multiple of the period`; they overlap where the distance between
        # two beginnings, which is `distance` modulo what both periods have in common, is shorter than a run.
        common = math.gcd(self.ranks * self.interleave, other.ranks * other.interleave)
        distance = (self.rank * self.interleave - other.rank * other.interleave) % common
        return distance < other.interleave or common - distance < self.interleave

    def run(self, block_size: int) -> int:
        """How many of a request's tokens follow each other in a block of `block_size`."""
        return block_size if self.ranks == 1 else self.interleave

    def __str__(self) -> str:
        return f"share {self.rank} of {self.ranks}, interleaved by {self.interleave} tokens"


ALL_TOKENS = TokenShare()


class Geometry(msgspec.Struct, frozen=True):
    """How a block lies in memory. Tensors of equal geometry share a step's offsets.

    `heads` are KV heads on this rank, `total_heads` those of the whole model (1 for MLA's latent);
    `head_bytes` is what one head of one token takes; `block_stride` the bytes from one block to the next;
    `block_size` the tokens that a block holds here, of those that are in this rank's `share`; `draft` what drafts, in
    a line, for the layers of speculative decoding's draft, and "" for those of the served model.
    """

    group: _Index
    order: Order
    dtype: str
    block_size: _Size
    block_stride: _Size
    heads: _Size
    total_heads: _Size
    head_bytes: _Size
    kind: BlockKind = BlockKind.TOKENS
    share: TokenShare = ALL_TOKENS
    draft: str = ""

    def __post_init__(self) -> None:
        if self.block_size % self.share.interleave:
            raise LayoutError(f"blocks of {self.block_size} tokens, interleaved by {self.share.interleave}")

    @property
    def span(self) -> int:
        """How many of a request's tokens a block id stands for."""
        return self.block_size * self.share.ranks

    @property
    def run(self) -> int:
        """How many of a request's tokens follow each other in a block."""
        return self.share.run(self.block_size)

    def is_known_to(self, draft: str) -> bool:
        """Whether an engine of the same model that drafts with `draft` ("": without layers of its own) has such
        caches."""
        return self.draft in ("", draft)

    @property
    def token_bytes(self) -> int:
        return self.heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes


class CacheTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache. `part` counts a layer's tensors (0: K, 1: V where they are apart);
    `geometry` indexes the rank's geometries; `base` is the address of block 0."""

    layer: str
    part: _Index
    base: _Address
    num_blocks: _Index
    geometry: _Index


class RankCaches(msgspec.Struct, frozen=True):
    """Every cache tensor of one rank."""

    geometries: tuple[Geometry, ...]
    tensors: tuple[CacheTensor, ...]

    def __post_init__(self) -> None:
        if any(tensor.geometry >= len(self.geometries) for tensor in self.tensors):
            raise LayoutError(f"a cache tensor of a geometry beyond the {len(self.geometries)} described")

    def geometry_of(self, tensor: CacheTensor) -> Geometry:
        return self.geometries[tensor.geometry]

    @property
    def draft(self) -> str:
        """What drafts with caches on this rank; "" if nothing does."""
        return max((geometry.draft for geometry in self.geometries), default="")

    def by_name(self) -> dict[tuple[str, int], int]:
        """(layer, part) -> index into `tensors`."""
        return {(t.layer, t.part): i for i, t in enumerate(self.tensors)}


def block_geometry(
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    *,
    group: int,
    dtype: str,
    block_size: int,
    heads: int,
    total_heads: int,
    heads_first: bool,
    share: TokenShare = ALL_TOKENS,
    draft: str = "",
) -> Geometry:
    """Geometry of a cache tensor `[num_blocks, heads, tokens, content]` or `[.., tokens, heads, content]`.

    `strides` are in elements, as torch gives them. Which of the two middle dimensions holds heads follows
    from their sizes; where the sizes are equal, from `heads_first`. The order in memory follows from strides
    alone.
    Raises LayoutError where a block is not one run of bytes.
    """
    if len(shape) != 4:
        raise LayoutError(f"cache tensor of shape {tuple(shape)}: expected 4 dimensions, block first")
    middle = (shape[1], shape[2])
    if heads_first and middle == (heads, block_size):
        head_dim, token_dim = 1, 2
    elif middle == (block_size, heads):
        head_dim, token_dim = 2, 1
    elif middle == (heads, block_size):
        head_dim, token_dim = 1, 2
    else:
        raise LayoutError(
            f"cache tensor of shape {tuple(shape)}: no dimensions of {heads} heads and {block_size} tokens"
        )
    content = shape[3]
    head_major = strides[head_dim] > strides[token_dim]
    expected = (block_size * content, content) if head_major else (content, heads * content)
    actual = (strides[head_dim], strides[token_dim])
    # A dimension of size 1 may carry any stride.
    fits = (heads == 1 or actual[0] == expected[0]) and (block_size == 1 or actual[1] == expected[1])
    apart = strides[0] >= heads * block_size * content
    if strides[3] != 1 or not fits or not apart:
        raise LayoutError(
            f"cache tensor of shape {tuple(shape)}, strides {tuple(strides)}: a block is not one run of bytes"
        )
    return Geometry(
        group=group,
        order=Order.HEAD_MAJOR if head_major else Order.TOKEN_MAJOR,
        dtype=dtype,
        block_size=block_size,
        block_stride=strides[0] * itemsize,
        heads=heads,
        total_heads=total_heads,
        head_bytes=content * itemsize,
        share=share,
        draft=draft,
    )
