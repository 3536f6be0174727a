# SPDX-License-Identifier: Apache-2.0
"""What each token's KV is, and a rank's caches with it: eight real bytes for each token, layer and head.

These bytes are a hash of the layer, the head, and all tokens of the request up to this one. So wrong KV differs.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from simulation.scenario import BLOCK
from vllm_ascend_pd.core.caches import RegisteredCaches, describe
from vllm_ascend_pd.core.layout import LayerSpec
from vllm_ascend_pd.core.topology import sharding

LAYERS = [f"layers.{n}.attn" for n in range(3)]
HEADS = 4
_WIDTH = 4  # 16-bit numbers of a head: eight bytes

Array: TypeAlias = np.ndarray


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3."""
    x = x.astype(np.uint64)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x


def prefix_hashes(tokens: Sequence[int]) -> Array:
    """Returns for each token a hash of it and of all before it."""
    ids = np.asarray(tokens, dtype=np.uint64)
    return _mix(np.cumsum(_mix(ids * np.uint64(0x9E3779B97F4A7C15) + np.arange(len(ids), dtype=np.uint64))))


_KINDS = np.arange(1, len(LAYERS) * HEADS + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
_SALTS = _mix(_KINDS).reshape(len(LAYERS), HEADS)


class Caches:
    """The KV caches of one rank. A slot is the place of a token: `block * BLOCK + offset`."""

    def __init__(self, blocks: int, tp: int, rank: int) -> None:
        heads = sharding(tp).heads(rank, HEADS)
        self._salts = _SALTS[:, list(heads)]
        shape = (blocks, BLOCK, len(heads), _WIDTH)
        self._tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in LAYERS]
        self._slots = [
            tensor.view(torch.int64).numpy().view(np.uint64).reshape(blocks * BLOCK, len(heads))
            for tensor in self._tensors
        ]
        self._block_bytes = BLOCK * len(heads) * _WIDTH * 2
        self._layer_bytes = blocks * self._block_bytes
        spec = LayerSpec(0, BLOCK, len(heads), HEADS)
        by_name = {name: (tensor,) for name, tensor in zip(LAYERS, self._tensors, strict=True)}
        self.registered: RegisteredCaches = describe(by_name, dict.fromkeys(by_name, spec), heads_first=False)

    def fill(self, layer: int, slots: Array, hashes: Array, wrong: Array | None = None) -> None:
        """Writes the KV of tokens with these prefix hashes. `wrong`: those whose KV is wrong, as a mask."""
        content = _mix(hashes[:, None] + self._salts[layer])
        if wrong is not None:
            content[wrong] ^= np.uint64(1)
        self._slots[layer][slots] = content

    def wrong_slots(self, slots: Array, hashes: Array) -> list[tuple[int, int]]:
        """Returns (layer, index into `slots`) where the KV is not that of tokens with these prefix hashes."""
        found = []
        for layer in range(len(LAYERS)):
            differ = (self._slots[layer][slots] != _mix(hashes[:, None] + self._salts[layer])).any(axis=1)
            found += [(layer, int(index)) for index in np.nonzero(differ)[0]]
        return found

    def blocks_at(self, address: int, num_bytes: int) -> range:
        """Returns the blocks of a layer at `address`; none if it is not in the caches."""
        for tensor in self._tensors:
            offset = address - tensor.data_ptr()
            if 0 <= offset < self._layer_bytes:
                first = offset // self._block_bytes
                return range(first, (offset + max(1, num_bytes) - 1) // self._block_bytes + 1)
        return range(0)
