# SPDX-License-Identifier: Apache-2.0
"""How one rank's KV cache lies in memory."""

import enum
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


class Kind(enum.Enum):
    """What a block holds: some tokens' KV, or a request's state after some token (`core/states.py`), which then
    counts as one token."""

    TOKENS = "tokens"
    STATE = "state"


class Geometry(msgspec.Struct, frozen=True):
    """How a block lies in memory. Tensors of equal geometry share a step's offsets.

    `heads` are KV heads on this rank, `total_heads` those of the whole model (1 for MLA's latent);
    `head_bytes` is what one head of one token takes; `block_stride` the bytes from one block to the next.
    """

    group: _Index
    order: Order
    dtype: str
    block_size: _Size
    block_stride: _Size
    heads: _Size
    total_heads: _Size
    head_bytes: _Size
    kind: Kind = Kind.TOKENS

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
    )
