# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV blocks and prefix cache, for the schedulers of both sides.

vLLM does not empty the prefix cache when weights change: it leaves that to whoever changes them. Here the cache is
emptied as soon as a rank reports an update.

Nor does vLLM notice that a LoRA adapter's files were replaced. Here requests with the new files find no KV of the old
ones.
"""

import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashListWithBlockSize

from vllm_ascend_pd.connector.adapters import content_beyond_name

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)

_HASH_BYTES = 32
_CLIENT_SALT = "cache_salt_of_client"
"""Attribute of a request whose salt was replaced: the salt before that."""
_SALT_KEY = secrets.token_bytes(_HASH_BYTES)
"""Makes salts of this module differ from any that a client can choose."""


class VllmBlocks:
    """Implements `EngineBlocks`. Used by the scheduler's thread alone."""

    def __init__(self) -> None:
        # Blocks of all cache groups. None until vLLM hands it over.
        self._pool: BlockPool | None = None
        # Rank -> its latest weight update after which the cache was emptied.
        self._updates: dict[str, int] = {}
        # Requests that have had blocks, for as long as vLLM keeps them.
        self._with_blocks: WeakSet[Any] = WeakSet()

    def bind(self, pool: "BlockPool") -> None:
        """Takes vLLM's block pool, which exists only after the connector was built."""
        self._pool = pool

    @property
    def weight_updates(self) -> dict[str, int]:
        return dict(self._updates)

    @staticmethod
    def arrived(request: Any) -> None:
        """Takes a new request, before it is looked up in the prefix cache. Tells apart adapters of one name."""
        if not (content := content_beyond_name(request.lora_request)):
            return
        _replace_salt(request, hashlib.blake2b(f"{request.cache_salt} {content}".encode(), key=_SALT_KEY).hexdigest())
        request.block_hashes.clear()
        request.update_block_hashes()

    def allocated(self, request: Any) -> None:
        self._with_blocks.add(request)

    def weights_updated(self, updates: dict[str, int]) -> None:
        if all(self._updates.get(rank) == count for rank, count in updates.items()):
            return
        self._updates.update(updates)
        for request in self._with_blocks:
            _make_unfindable(request)
        self._with_blocks.clear()
        dropped = 0
        if self._pool is not None:
            cached = {block.block_id for block in self._pool.blocks if block.block_hash is not None}
            self._pool.evict_blocks(cached)
            dropped = len(cached)
        logger.info("weights were updated: %d blocks were dropped from the prefix cache", dropped)

    def are_cached(self, request: Any, group: int, span: int, first: int, stop: int) -> bool:
        pool = self._pool
        if pool is None or span % pool.hash_block_size:  # prefix caching is off
            return False
        hashes = BlockHashListWithBlockSize(request.block_hashes, pool.hash_block_size, span)
        return stop <= len(hashes) and all(
            pool.get_cached_block(hashes[number], [group]) is not None for number in range(first, stop)
        )

    def hold(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])


def _make_unfindable(request: Any) -> None:
    """Gives the request's blocks hashes that no other request has.

    Some of its blocks hold KV of the old weights. Later blocks attend to those, and vLLM will cache them. Each hash
    depends on the one before it, and the first one on the salt.
    """
    _replace_salt(request, secrets.token_hex(_HASH_BYTES))
    request.block_hashes[:] = [BlockHash(secrets.token_bytes(_HASH_BYTES)) for _ in request.block_hashes]


def _replace_salt(request: Any, salt: str) -> None:
    if not hasattr(request, _CLIENT_SALT):
        setattr(request, _CLIENT_SALT, request.cache_salt)
    request.cache_salt = salt


def salt_of_client(request: Any) -> str | None:
    """Returns the `cache_salt` that the request came with. The one that it has now may be of this module."""
    salt: str | None = getattr(request, _CLIENT_SALT, request.cache_salt)
    return salt
