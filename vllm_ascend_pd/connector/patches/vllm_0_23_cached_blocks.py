# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.23's block allocation on decode: new blocks of a request are none of its cached ones, as in 0.30.

Version 0.23 allocates for tokens that a connector delivers one cache group at a time. Each group takes its cached
blocks first and new blocks then. So the new blocks of one group may be cached blocks of the next group, and prefill
would write both groups' KV into them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def install() -> None:
    """Patches vLLM 0.23; does nothing in 0.30. May be called again."""
    if HAS_TRANSFER_RESULTS:
        return
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    by_vllm = KVCacheCoordinator.allocate_new_computed_blocks
    if by_vllm.__module__ == __name__:
        return

    def allocate_new_computed_blocks(
        self: Any,
        request_id: str,
        new_computed_blocks: "tuple[Sequence[KVCacheBlock], ...]",
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        tokens = num_local_computed_tokens + num_external_computed_tokens
        kept: list[KVCacheBlock] = []
        if num_external_computed_tokens:
            for manager, cached in zip(self.single_type_managers, new_computed_blocks, strict=True):
                # Blocks that have left a window are not taken.
                skipped = manager.get_num_skipped_tokens(tokens) // manager.block_size
                kept += [block for block in cached[skipped:] if not block.is_null]
        self.block_pool.touch(kept)
        by_vllm(self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens)
        self.block_pool.free_blocks(reversed(kept))

    KVCacheCoordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
