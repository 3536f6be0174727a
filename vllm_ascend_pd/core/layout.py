# SPDX-License-Identifier: Apache-2.0
"""Describes how one rank's KV cache lies in memory."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from vllm_ascend_pd.core.bounds import MAX_GEOMETRIES, MAX_TENSORS
from vllm_ascend_pd.core.text import NAME

# Descriptions come from other engines. Within these ranges an id times a size is below 2**62.
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
_Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LayoutError(ValueError):
    """A cache tensor's memory layout cannot be described, or does not fit another one."""


class Order(enum.Enum):
    """What varies slowest inside a block."""

    # Each head's part of a block is one run of bytes, which is moved as a whole. Its content is opaque: vLLM's CPU
    # backend packs K and V inside it in an order that depends on the instruction set.
    HEAD_MAJOR = "head_major"
    # Each token's heads are one run of bytes (vllm-ascend).
    TOKEN_MAJOR = "token_major"


class BlockKind(enum.Enum):
    """What a block holds."""

    # KV of some tokens.
    TOKENS = "tokens"
    # A request's state after some token (`core/states.py`). It counts as one token.
    STATE = "state"


class Packing(enum.Enum):
    """In which form decode keeps KV that prefill keeps token-major, in elements of 16 bits.

    vllm-ascend's int8 caches (C8 for dense attention, FAKQuant for MLA) are in NZ order. A block of KV has a row for
    each token. In NZ order it is cut into columns of 32 bytes, which follow each other. So each head's part of a block
    is one run of bytes.
    """

    NONE = "none"
    # Both tensors of dense attention, and MLA's latent.
    INT8_NZ = "int8_nz"
    # MLA's rope, which keeps its type.
    NZ = "nz"


NZ_COLUMN_BYTES = 32
"""Bytes of a row that are in one column in NZ order."""

_NZ_ROWS = 16  # rows in a piece of a column: a block must have whole ones


class TokenShare(msgspec.Struct, frozen=True):
    """Which of a request's tokens a rank holds: all of them, or with context parallelism the share of one rank.

    Tokens are divided in runs: run `n` is on rank `n % ranks`. A block id stands for a block on each of these ranks.
    """

    # Ranks that share the tokens.
    ranks: _Size = 1
    # This rank's place among them.
    rank: _Index = 0
    # Tokens in a run (vLLM's `cp_kv_cache_interleave_size`).
    interleave: _Size = 1

    def __post_init__(self) -> None:
        if self.rank >= self.ranks:
            raise LayoutError(f"share {self.rank} of tokens that are shared by {self.ranks} ranks")

    def meets(self, other: "TokenShare") -> bool:
        """Returns whether some tokens of a long prompt are in both shares."""
        # Runs of each begin at a start plus a multiple of its period. Two overlap if their beginnings are less than a
        # run apart. That distance is `distance` modulo the periods' greatest common divisor.
        common = math.gcd(self.ranks * self.interleave, other.ranks * other.interleave)
        distance = (self.rank * self.interleave - other.rank * other.interleave) % common
        return distance < other.interleave or common - distance < self.interleave

    def run(self, block_size: int) -> int:
        """Returns how many of a request's tokens follow each other in a block of `block_size` tokens."""
        return block_size if self.ranks == 1 else self.interleave

    def __str__(self) -> str:
        return f"share {self.rank} of {self.ranks}, interleaved by {self.interleave} tokens"


ALL_TOKENS = TokenShare()


class Geometry(msgspec.Struct, frozen=True):
    """How the blocks of a cache tensor lie in memory. Tensors of equal geometry share a step's offsets."""

    # vLLM's cache group, which has a block table of its own.
    group: _Index
    order: Order
    # What an element is, as both sides compare it.
    dtype: Annotated[str, NAME]
    # Tokens that a block stands for, of those in this rank's `share`.
    block_size: _Size
    # Bytes from one block to the next.
    block_stride: _Size
    # KV heads on this rank.
    heads: _Size
    # KV heads of the whole model. 1 for MLA's latent.
    total_heads: _Size
    # Bytes of one head of one entry.
    head_bytes: _Size
    kind: BlockKind = BlockKind.TOKENS
    # The tokens whose KV is on this rank.
    share: TokenShare = ALL_TOKENS
    # For layers of speculative decoding's draft model: that model, in a line. "" for layers of the served model.
    draft: Annotated[str, NAME] = ""
    # Tokens that one entry of a block is computed from. More than 1 for the compressed caches of DeepSeek V4.
    tokens_per_entry: _Size = 1
    # In which form decode keeps this cache. Decode's order is HEAD_MAJOR then, prefill's TOKEN_MAJOR.
    packing: Packing = Packing.NONE
    # Whether ranks of decode context parallelism each keep all tokens of this cache: the index of sparse attention.
    # Prefill's ranks then each send their share of the tokens, like that of other caches.
    copied: bool = False

    def __post_init__(self) -> None:
        if self.packing is not Packing.NONE:
            self._check_packing()
        if self.block_size % self.share.interleave:
            raise LayoutError(f"blocks of {self.block_size} tokens, interleaved by {self.share.interleave}")
        if self.block_size % self.tokens_per_entry:
            raise LayoutError(f"blocks of {self.block_size} tokens, with an entry for {self.tokens_per_entry} of them")
        if self.tokens_per_entry > 1 and self.share.ranks > 1:
            raise LayoutError(
                f"context parallelism with caches that keep one entry for {self.tokens_per_entry} tokens is not "
                "supported"
            )

    def _check_packing(self) -> None:
        if self.share.ranks > 1:
            raise LayoutError("context parallelism with caches that decode keeps in int8 is not supported")
        head_bytes = self._sent_head_bytes
        if self.block_size % _NZ_ROWS or head_bytes % NZ_COLUMN_BYTES:
            raise LayoutError(
                f"blocks of {self.block_size} tokens with heads of {head_bytes} bytes cannot lie in NZ order: these "
                f"must be multiples of {_NZ_ROWS} and {NZ_COLUMN_BYTES}"
            )

    @property
    def is_packed_on_the_way(self) -> bool:
        """Whether this is a cache of prefill that decode keeps in another form."""
        return self.packing is not Packing.NONE and self.order is Order.TOKEN_MAJOR

    @property
    def sent(self) -> "Geometry":
        """The form in which blocks of this cache reach decode."""
        if not self.is_packed_on_the_way:
            return self
        head_bytes = self._sent_head_bytes
        return msgspec.structs.replace(
            self,
            order=Order.HEAD_MAJOR,
            dtype="int8" if self.packing is Packing.INT8_NZ else self.dtype,
            head_bytes=head_bytes,
            block_stride=self.block_size * self.heads * head_bytes,
        )

    @property
    def _sent_head_bytes(self) -> int:
        shrinks = self.is_packed_on_the_way and self.packing is Packing.INT8_NZ
        return self.head_bytes // 2 if shrinks else self.head_bytes

    @property
    def span(self) -> int:
        """Tokens of a request that a block id stands for."""
        return self.block_size * self.share.ranks

    def ticket_block_size(self, parts: int) -> int:
        """Returns the block size that tickets name for its group. `parts`: how many decode ranks share tokens."""
        return self.block_size // parts if self.copied else self.block_size

    @property
    def run(self) -> int:
        """Tokens of a request that follow each other in a block."""
        return self.share.run(self.block_size)

    def is_known_to(self, draft: str) -> bool:
        """Returns whether an engine of the same model has such caches. `draft`: its draft model, "" without one."""
        return self.draft in ("", draft)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: of one token, unless the cache is compressed."""
        return self.heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block that hold KV."""
        return self.block_size // self.tokens_per_entry * self.entry_bytes

    def complete(self, tokens: int) -> int:
        """Returns how many of a prompt's first `tokens` are in complete entries.

        The others are not in this cache: the compressor's state has them, as tokens of a window.
        """
        return tokens - tokens % self.tokens_per_entry


class CacheTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache."""

    layer: Annotated[str, NAME]
    # Counts the layer's tensors: 0 is K and 1 is V if they are two.
    part: _Index
    # Address of block 0.
    base: _Address
    num_blocks: _Index
    # Index into the rank's geometries.
    geometry: _Index
    # A fingerprint of what it is quantized by. "" unless decode keeps it in int8.
    scales: Annotated[str, NAME] = ""


class RankCaches(msgspec.Struct, frozen=True):
    """Every cache tensor of one rank."""

    geometries: Annotated[tuple[Geometry, ...], msgspec.Meta(max_length=MAX_GEOMETRIES)]
    tensors: Annotated[tuple[CacheTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    def __post_init__(self) -> None:
        if any(tensor.geometry >= len(self.geometries) for tensor in self.tensors):
            raise LayoutError(f"a cache tensor of a geometry beyond the {len(self.geometries)} described")

    def geometry_of(self, tensor: CacheTensor) -> Geometry:
        return self.geometries[tensor.geometry]

    @property
    def draft(self) -> str:
        """The draft model with caches on this rank; "" if there is none."""
        return max((geometry.draft for geometry in self.geometries), default="")

    def by_name(self) -> dict[tuple[str, int], int]:
        """Returns a map from (layer, part) to the index into `tensors`."""
        return {(t.layer, t.part): i for i, t in enumerate(self.tensors)}


@dataclass(frozen=True)
class LayerSpec:
    """What the tensors of a layer's cache hold. Fields without a comment are as in `Geometry`."""

    group: int
    block_size: int
    heads: int
    total_heads: int
    # What is encoded in tensors of plain bytes (uint8). None if the bytes are numbers.
    encoding: str | None = None
    share: TokenShare = ALL_TOKENS
    draft: str = ""
    tokens_per_entry: int = 1
    # By tensor, in which form decode keeps it. Empty: in the same as prefill.
    packings: tuple[Packing, ...] = ()
    # Whether the tensors are in that form already, because they are decode's.
    is_packed: bool = False
    # By tensor, as in `CacheTensor`.
    scales: tuple[str, ...] = ()
    # The first tensor that is `copied`, as in `Geometry`, like all behind it. None: no tensor is.
    copied_from: int | None = None
    # How many ranks of this engine each keep all tokens of those tensors, in blocks so many times as long.
    copies: int = 1

    def of_copied(self) -> "LayerSpec":
        """Returns the spec of the tensors that are `copied`."""
        share = ALL_TOKENS if self.copies > 1 else self.share
        return replace(self, block_size=self.block_size * self.copies, share=share)


def block_geometry(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, dtype: str, spec: LayerSpec, *, heads_first: bool
) -> Geometry:
    """Returns the geometry of a cache tensor `[num_blocks, heads, tokens, content]` or `[.., tokens, heads, content]`.

    `strides`: in elements, as torch gives them. The order in memory follows from them alone.
    `spec`: of the layer. The dimension of tokens counts entries if the cache is compressed.
    `heads_first`: which of the two middle dimensions holds heads if their sizes are equal. Else the sizes decide.

    Raises LayoutError if a block is not one run of bytes.
    """
    heads, block_size = spec.heads, spec.block_size // spec.tokens_per_entry
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
            f"cache tensor of shape {tuple(shape)}: no dimensions of {heads} heads and {block_size} "
            f"{'tokens' if spec.tokens_per_entry == 1 else f'entries of {spec.tokens_per_entry} tokens'}"
        )
    content = shape[3]
    head_major = strides[head_dim] > strides[token_dim]
    expected = (block_size * content, content) if head_major else (content, heads * content)
    actual = (strides[head_dim], strides[token_dim])
    # A dimension of size 1 may have any stride.
    fits = (heads == 1 or actual[0] == expected[0]) and (block_size == 1 or actual[1] == expected[1])
    apart = strides[0] >= heads * block_size * content
    if strides[3] != 1 or not fits or not apart:
        raise LayoutError(
            f"cache tensor of shape {tuple(shape)}, strides {tuple(strides)}: a block is not one run of bytes"
        )
    return Geometry(
        group=spec.group,
        order=Order.HEAD_MAJOR if head_major else Order.TOKEN_MAJOR,
        dtype=dtype,
        block_size=spec.block_size,
        block_stride=strides[0] * itemsize,
        heads=heads,
        total_heads=spec.total_heads,
        head_bytes=content * itemsize,
        share=spec.share,
        draft=spec.draft,
        tokens_per_entry=spec.tokens_per_entry,
    )
