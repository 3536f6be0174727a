# SPDX-License-Identifier: Apache-2.0
"""Empties the engine's prefix cache when its ranks' weights have changed: vLLM leaves that to who changes them."""

import logging
import secrets
from typing import TYPE_CHECKING
from weakref import WeakSet

from vllm.v1.core.kv_cache_utils import BlockHash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_HASH_BYTES = 32


class OldWeights:
    """Blocks computed with weights that the ranks no longer have are found in the prefix cache by no later request."""

    def __init__(self) -> None:
        self._updates: dict[str, int] = {}
        self._pool: BlockPool | None = None
        self._begun: WeakSet[Request] = WeakSet()  # requests that have had blocks, for as long as vLLM keeps them

    @property
    def known_updates(self) -> dict[str, int]:
        """Rank -> the number of its weight updates that the cache has been emptied for. Ranks without any are left
        out."""
        return dict(self._updates)

    def bind(self, pool: "BlockPool") -> None:
        """`pool`: which all cache groups' blocks are from."""
        self._pool = pool

    def begins(self, request: "Request") -> None:
        """The request has been given blocks."""
        self._begun.add(request)

    def reported(self, updates: dict[str, int]) -> None:
        """Ranks have had so many updates. Empties the cache if one has had another one."""
        if all(self._updates.get(rank) == count for rank, count in updates.items()):
            return
        self._updates.update(updates)
        for request in self._begun:
            _make_unfindable(request)
        self._begun.clear()
        dropped = 0
        if self._pool is not None:
            cached = {block.block_id for block in self._pool.blocks if block.block_hash is not None}
            self._pool.evict_blocks(cached)
            dropped = len(cached)
        logger.info("weights were updated: %d blocks were dropped from the prefix cache", dropped)


def _make_unfindable(request: "Request") -> None:
    """Gives the request's blocks hashes that no other request has. Some hold KV of the old weights already. Later
    blocks see those, and vLLM will cache them. Each hash depends on the one before it, the first on the salt."""
    request.cache_salt = secrets.token_hex(_HASH_BYTES)
    request.block_hashes[:] = [BlockHash(secrets.token_bytes(_HASH_BYTES)) for _ in request.block_hashes]
