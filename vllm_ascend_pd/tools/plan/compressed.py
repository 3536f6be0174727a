# SPDX-License-Identifier: Apache-2.0
"""The caches of DeepSeek V4's layers, which keep one entry for several tokens.

Sizes are those of vllm-ascend 0.23 on Atlas A2 and A3 (`models/deepseek_v4.py`, `models/layer/attention/layer.py`).
"""

from dataclasses import dataclass

BLOCK_SIZES = (32, 64, 128)
"""The values of `--block-size` that vllm-ascend takes for this model."""

RATIOS = (4, 128)
"""The tokens per entry that vllm-ascend's compressor takes. With 0 or 1, a layer has its window alone."""

_LATENT, _INDEX, _SCALE, _STATE = 2, 1, 2, 4  # bytes of an element


@dataclass(frozen=True)
class TensorEntry:
    """An entry of one tensor."""

    dtype: str  # as torch names it
    width: int  # elements
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.width * self.itemsize


@dataclass(frozen=True)
class LayerCache:
    """One of a layer's caches. Every rank has all of it."""

    name: str  # in vllm-ascend, without the layer's name
    tensors: tuple[TensorEntry, ...]
    tokens_per_entry: int = 1
    window: int = 0  # tokens at a prompt's end that are sent. 0: all of them
    block_share: int = 1  # a block has `--block-size` divided by this many entries

    def entries(self, block_size: int) -> int:
        """Returns the entries of a block. `block_size`: the engine's `--block-size`."""
        return block_size // self.block_share

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token of a long prompt. 0 for a window, whose bytes do not grow with the prompt."""
        return 0 if self.window else whole(self._entry_bytes / self.tokens_per_entry)

    @property
    def window_bytes(self) -> int:
        """Bytes of a whole window."""
        return self.window * self._entry_bytes

    @property
    def _entry_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def layer_caches(ratio: int, head: int, index: int, window: int, latent_dtype: str) -> tuple[LayerCache, ...]:
    """Returns the caches of a layer. `ratio`: tokens per entry. `head`, `index`: elements of a latent and of an
    indexer's key. `window`: tokens that every layer sees uncompressed. `latent_dtype`: of two bytes."""
    latent = TensorEntry(latent_dtype, head, _LATENT)
    found = [LayerCache("swa_cache", (latent,), window=window)]
    if ratio <= 1:
        return tuple(found)
    found.append(LayerCache("attn", (latent,), ratio))
    found.append(_compressor("compressor.state_cache", ratio, head))
    if ratio == RATIOS[0]:
        keys = (TensorEntry("int8", index, _INDEX), TensorEntry("float16", 1, _SCALE))
        found.append(LayerCache("indexer.k_cache", keys, ratio))
        found.append(_compressor("indexer.compressor.state_cache", ratio, index))
    return tuple(found)


def _compressor(name: str, ratio: int, width: int) -> LayerCache:
    """Returns the cache of what an unfinished entry is computed from. Entries for 4 tokens overlap."""
    both = 2 if ratio == RATIOS[0] else 1
    state = TensorEntry("float32", 2 * both * width, _STATE)  # keys and their scores
    return LayerCache(name, (state,), window=both * ratio, block_share=16 if ratio == RATIOS[0] else 4)


def whole(number: float) -> float:
    """Returns the number, as int if it is one."""
    return int(number) if number == int(number) else number
