# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.23's scheduler on decode: a request fails by its lost blocks in any cache group, as in 0.30.

Version 0.23 learns of failures by block ids only. For a model with several cache groups, its engine ends when it gets
any. All groups share one block pool, so a block that was not cached before belongs to one request, whatever the group.

With `kv_load_failure_policy` recompute, such a request starts from its beginning, as in 0.30: the connector is asked
once more. vLLM 0.23 itself would go on behind what is cached, and compute the rest.
"""

from typing import Any

from vllm_ascend_pd.connector.caches import lost_blocks_say_all
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS


def install() -> None:
    """Patches vLLM 0.23; does nothing in 0.30. May be called again."""
    if HAS_TRANSFER_RESULTS:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    by_vllm = Scheduler._handle_invalid_blocks
    if by_vllm.__module__ == __name__:
        return

    def handle_invalid_blocks(self: Any, lost: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        failed: set[str]
        vllm_can = lost_blocks_say_all(self.kv_cache_config)
        if self.recompute_kv_load_failures or not vllm_can:
            waiting = [r for r in self.skipped_waiting if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
            hit = [r for r in waiting if any(map(lost.intersection, self.kv_cache_manager.get_block_ids(r.request_id)))]
            failed = {request.request_id for request in hit}
            if not self.recompute_kv_load_failures:
                return failed
            for request in hit:
                request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids |= failed
            if not vllm_can:
                return set()
        failed = by_vllm(self, lost, num_scheduled_tokens)
        return failed

    Scheduler._handle_invalid_blocks = handle_invalid_blocks
