# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV blocks and prefix cache, for the schedulers of both sides.

vLLM does not empty the prefix cache when weights change: it leaves that to whoever changes them. Here the cache is
emptied as soon as a rank reports an update.

Nor does vLLM notice that a LoRA adapter's files were replaced. Here requests with the new files find no KV of the old
ones.
"""

import hashlib
import logging
import math
import secrets
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashListWithBlockSize

from vllm_ascend_pd.connector.vllm_view import ADAPTER
from vllm_ascend_pd.connector.weights import AdapterRead, Adapters
from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


logger = logging.getLogger(__name__)


_HASH_BYTES = 32
_CLIENT_SALT = "cache_salt_of_client"
"""Attribute of a request whose salt was replaced: the salt before that."""
_SALT_KEY = secrets.token_bytes(_HASH_BYTES)
"""Makes salts of this module differ from any that a client can choose."""


class VllmBlocks:
    """Implements `EngineBlocks`. Used by the scheduler's thread alone. `groups`: the engine's cache groups."""

    def __init__(self, groups: Sequence[CacheGroup] = ()) -> None:
        self._groups = list(groups)
        # Blocks of all cache groups. None until vLLM hands it over.
        self._pool: BlockPool | None = None
        # Rank -> its latest weight update after which the cache was emptied.
        self._updates: dict[str, int] = {}
        # Requests that have had blocks, for as long as vLLM keeps them.
        self._with_blocks: WeakSet[Any] = WeakSet()
        self._adapters = Adapters()
        # Requests whose adapters have not been read yet, by id, with the reads.
        self._unread: dict[str, tuple[Any, AdapterRead]] = {}

    def bind(self, pool: "BlockPool") -> None:
        self._pool = pool

    @property
    def weight_updates(self) -> dict[str, int]:
        return dict(self._updates)

    def add_request(self, request: Any) -> None:
        if request.lora_request is not None:
            self._unread[request.request_id] = request, self._adapters.read(request.lora_request)
            self.take_adapters()

    def take_adapters(self) -> None:
        """Requests with other content of one name find no KV of each other."""
        for request, known in list(self._unread.values()):
            content = self._adapters.content(request.lora_request, known)
            if content is None and not request.is_finished():
                continue
            del self._unread[request.request_id]
            if content is None:
                continue
            setattr(request, ADAPTER, content.digest)
            if content.beyond_name:
                salted = f"{request.cache_salt} {content.beyond_name}".encode()
                _replace_salt(request, hashlib.blake2b(salted, key=_SALT_KEY).hexdigest())
                request.block_hashes.clear()
                request.update_block_hashes()

    def is_ready(self, request: Any) -> bool:
        return request.request_id not in self._unread

    def allocated(self, request: Any) -> None:
        self._with_blocks.add(request)

    def weights_updated(self, updates: dict[str, int]) -> bool:
        if all(self._updates.get(rank) == count for rank, count in updates.items()):
            return False
        self._updates.update(updates)
        logger.info("weights were updated: %d blocks were dropped from the prefix cache", self.drop_cached())
        return True

    def drop_cached(self) -> int:
        for request in self._with_blocks:
            _make_unfindable(request)
        self._with_blocks.clear()
        if self._pool is None:
            return 0
        cached = {block.block_id for block in self._pool.blocks if block.block_hash is not None}
        self._pool.evict_blocks(cached)
        return len(cached)

    def evict(self, block_ids: Collection[int]) -> None:
        if self._pool is not None:
            self._pool.evict_blocks(set(block_ids))

    def have_prompt(self, request: Any, num_computed_tokens: int) -> bool:
        """The whole prompt counts as cached in two cases:

        - Only the last token is left.
        - The prompt ends with a block, and the cache has the blocks that vLLM computes once more: the last one, or the
          last two with an EAGLE head.
        """
        prompt = request.num_prompt_tokens
        if prompt - num_computed_tokens <= 1:
            return True
        # Windows are left out if there are other groups. For a window, vLLM keeps the blocks that the tokens after a
        # hit see, and not the prompt's last one. These are there, or the hit would end earlier. A state cannot be
        # computed once more from the one at the prompt's end, so for states the second case does not count.
        if any(group.holds_state for group in self._groups):
            return False
        tokens = [(index, group) for index, group in enumerate(self._groups) if isinstance(group, TokenGroup)]
        decisive = [(index, group) for index, group in tokens if not group.windowed] or tokens
        if not decisive:
            return False
        aligned = math.lcm(*(group.span for _, group in tokens))
        end = prompt - prompt % aligned
        if prompt - end > 1 or end - num_computed_tokens > 2 * aligned:
            return False
        return all(
            self._are_cached(request, index, group.span, num_computed_tokens // group.span, end // group.span)
            for index, group in decisive
        )

    def cached_tokens(self, request: Any) -> int:
        if any(group.holds_state for group in self._groups):
            return 0
        groups = [(index, group) for index, group in enumerate(self._groups) if isinstance(group, TokenGroup)]
        whole = [(index, group) for index, group in groups if not group.windowed] or groups
        aligned = math.lcm(*(group.span for _, group in groups))
        most = min((self._cached_of(request, index, group.span) for index, group in whole), default=0)
        return most - most % aligned

    def _cached_of(self, request: Any, group: int, span: int) -> int:
        """Returns how many tokens from the prompt's first one on the prefix cache has in a cache group. `span`: tokens
        per block."""
        hashes = self._hashes(request, span)
        most = min(len(hashes), (request.num_tokens - 1) // span)
        number = 0
        while number < most and self._is_cached(hashes[number], group):
            number += 1
        return number * span

    def _are_cached(self, request: Any, group: int, span: int, first: int, stop: int) -> bool:
        """Whether the prefix cache has blocks `[first, stop)` of a cache group. `span`: tokens per block."""
        hashes = self._hashes(request, span)
        return stop <= len(hashes) and all(self._is_cached(hashes[number], group) for number in range(first, stop))

    def _hashes(self, request: Any, span: int) -> Sequence[BlockHash]:
        """Returns the hashes of the request's full blocks of `span` tokens; none if prefix caching is off."""
        pool = self._pool
        if pool is None or span % pool.hash_block_size:
            return ()
        hashes: Sequence[BlockHash] = BlockHashListWithBlockSize(request.block_hashes, pool.hash_block_size, span)
        return hashes

    def _is_cached(self, block: BlockHash, group: int) -> bool:
        assert self._pool is not None
        return self._pool.get_cached_block(block, [group]) is not None

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
