# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model keeps of a request: KV of all its tokens or of the last ones, or a state.

The caches of DeepSeek V4's layers keep one entry for several tokens. Their sizes are those of vllm-ascend 0.23 on Atlas
A2 and A3 (`models/deepseek_v4.py`, `models/layer/attention/layer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vllm_ascend_pd.core.layout import Packing

BLOCK_SIZES = (32, 64, 128)
"""The values of `--block-size` that vllm-ascend takes for DeepSeek V4."""

RATIOS = (4, 128)
"""The tokens per entry that vllm-ascend's compressor takes. With 0 or 1, a layer has its window alone."""


@dataclass(frozen=True)
class TensorEntry:
    """What one tensor has for a token, for several tokens of a compressed cache, or for a request if it is a state."""

    dtype: str  # as torch names it
    itemsize: int  # bytes of an element
    heads: int  # of the whole model. 1 for a latent, which every rank has
    width: int  # elements of a head

    @property
    def head_bytes(self) -> int:
        return self.width * self.itemsize


@dataclass(frozen=True)
class LayerCache:
    """One of a layer's caches. It has all tokens of a request, unless it has a `window`, a `chunk` or a state."""

    name: str  # without the layer's name
    tensors: tuple[TensorEntry, ...]  # none for a state of unknown size
    tokens_per_entry: int = 1
    window: int = 0  # tokens that the next token sees, itself included
    chunk: int = 0  # tokens are in chunks of so many, and the next token sees those of its own
    is_state: bool = False  # one entry for a whole request
    block_share: int = 1  # a block has `--block-size` divided by this many entries
    packings: tuple[Packing, ...] = ()  # by tensor, in which form decode keeps it, if in another one than prefill

    @property
    def is_bounded(self) -> bool:
        """Whether its bytes do not grow with long prompts."""
        return bool(self.window or self.chunk or self.is_state)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, with all heads."""
        return sum(tensor.heads * tensor.head_bytes for tensor in self.tensors)

    @property
    def bytes_per_token(self) -> float:
        """Bytes by which a long prompt's next token lets it grow, with all heads."""
        return 0 if self.is_bounded else self.entry_bytes / self.tokens_per_entry

    @property
    def bounded_bytes(self) -> int:
        """The most bytes that the next token needs of a cache that does not grow; 0 of others."""
        return self.entry_bytes * (1 if self.is_state else self.window or self.chunk)

    def block_tokens(self, block_size: int) -> int:
        """Returns the tokens of a block. `block_size`: the engine's `--block-size`."""
        return 1 if self.is_state else block_size // self.block_share * self.tokens_per_entry

    def seen_from(self, token: int) -> int:
        """Returns the first token that token number `token` sees, as in `core.caches.TokenGroup`."""
        if self.window:
            return max(0, token + 1 - self.window)
        return token - token % self.chunk if self.chunk else 0

    def most_blocks(self, tokens: int, block_size: int) -> int:
        """Returns the most blocks that a request of `tokens` has at a time, once its prompt is there."""
        if self.is_state:
            return 1
        size = self.block_tokens(block_size)
        blocks = -(-tokens // size)
        if self.window:  # it may begin and end within blocks
            blocks = min(blocks, -(-(self.window - 1) // size) + 1)
        return min(blocks, -(-self.chunk // size)) if self.chunk else blocks


@dataclass(frozen=True)
class ModelShape:
    """What the size of a model's KV cache depends on."""

    name: str
    attention_heads: int
    layers: tuple[tuple[LayerCache, ...], ...]  # the caches of each. A layer that reads another's has none
    notes: tuple[str, ...] = ()  # what the figures leave out
    mla: bool = False

    @cached_property
    def kinds(self) -> tuple[LayerCache, ...]:
        """The different caches of `layers`."""
        return tuple(dict.fromkeys(cache for caches in self.layers for cache in caches))

    @property
    def has_states(self) -> bool:
        return any(cache.is_state for cache in self.kinds)

    @property
    def leaves_last_token(self) -> bool:
        """Whether decode computes a prompt's last token itself, as in `core.caches.left_to_decode`."""
        return any(cache.is_bounded for cache in self.kinds)

    @property
    def is_compressed(self) -> bool:
        """Whether some caches have one entry for several tokens."""
        return any(cache.tokens_per_entry > 1 for cache in self.kinds)

    @property
    def is_sparse(self) -> bool:
        """Whether it is MLA with the index of sparse attention."""
        return self.mla and any(len(cache.tensors) > 2 for cache in self.kinds if not cache.is_state)

    @property
    def is_packed(self) -> bool:
        """Whether decode keeps some caches in int8, and prefill does not."""
        return any(cache.packings for cache in self.kinds)


def compressed_caches(ratio: int, head: int, index: int, window: int, latent_dtype: str) -> tuple[LayerCache, ...]:
    """Returns the caches of a layer of DeepSeek V4. `ratio`: tokens per entry. `head`, `index`: elements of a latent
    and of an indexer's key. `window`: tokens that every layer sees uncompressed. `latent_dtype`: of two bytes."""
    latent = TensorEntry(latent_dtype, 2, 1, head)
    found = [LayerCache("swa_cache", (latent,), window=window)]
    if ratio <= 1:
        return tuple(found)
    found.append(LayerCache("attn", (latent,), ratio))
    found.append(_compressor("compressor.state_cache", ratio, head))
    if ratio == RATIOS[0]:
        keys = (TensorEntry("int8", 1, 1, index), TensorEntry("float16", 2, 1, 1))
        found.append(LayerCache("indexer.k_cache", keys, ratio))
        found.append(_compressor("indexer.compressor.state_cache", ratio, index))
    return tuple(found)


def _compressor(name: str, ratio: int, width: int) -> LayerCache:
    """Returns the cache of what an unfinished entry is computed from. Entries for 4 tokens overlap."""
    both = 2 if ratio == RATIOS[0] else 1
    state = TensorEntry("float32", 4, 1, 2 * both * width)  # keys and their scores
    return LayerCache(name, (state,), window=both * ratio, block_share=16 if ratio == RATIOS[0] else 4)


def linear_state(
    keys: tuple[int, int], values: tuple[int, int], kernel: int, conv: tuple[str, int], recurrent: tuple[str, int]
) -> LayerCache:
    """Returns what a layer of linear attention keeps: Gated DeltaNet, Kimi's KDA, Mamba 2.

    `keys`, `values`: heads and elements of a head. In Mamba 2 these are the groups of B and C, and x.
    `kernel`: of the convolution. `conv`, `recurrent`: each state's dtype and bytes of an element.

    The shapes are those of vLLM's `MambaStateShapeCalculator`. A convolution's state has a row for each token that it
    looks back to, whose sections are divided among ranks by themselves (`core/states.py`).
    """
    row = [TensorEntry(*conv, heads, width) for heads, width in (keys, keys, values)]
    last = TensorEntry(*recurrent, values[0], values[1] * keys[1])
    return LayerCache("state", (*row * (kernel - 1), last), is_state=True)
