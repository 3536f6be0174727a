# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.32's scheduler on decode: no request waits forever for blocks that none can use or needs.

Before a transfer starts, vLLM wants more free blocks than its own: those that drafts and other requests will need. It
counts too many in two cases:

- A request whose transfer failed has lost its blocks and waits like any other. It still counts, so a transfer before it
  in the queue may never start, nor may requests behind that transfer.
- A prompt with drafts may need all blocks that exist. Then no other block can be free, and none is needed: a request
  takes no more blocks than `max_model_len` tokens have.

And a request whose transfer failed stays in the queue of those that hold blocks. If it does not fit beside requests
behind it whose KV has arrived, those never run. With the patch, it waits like those that hold none.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


def fits(scheduler: Any) -> bool:
    """Whether vLLM's scheduler has a queue of its own for requests that hold blocks."""
    return hasattr(scheduler, "_handle_blocked_waiting_request")


def install() -> None:
    """Patches the loaded vLLM. May be called again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if Scheduler._update_waiting_for_remote_kv.__module__ == __name__:
        return
    release_reservations_of_failed_transfers(Scheduler)
    _reserve_nothing_for_a_request_alone(Scheduler)
    _requeue_failed_transfers(Scheduler)


def release_reservations_of_failed_transfers(scheduler: Any) -> None:
    """Reserves no blocks for a request that has lost its own."""
    by_vllm = scheduler._update_waiting_for_remote_kv

    def update_waiting_for_remote_kv(self: Any, request: "Request") -> None:
        by_vllm(self, request)
        if not has_blocks(self, request):
            self._inflight_prefills.discard(request)

    scheduler._update_waiting_for_remote_kv = update_waiting_for_remote_kv


def has_blocks(scheduler: Any, request: "Request") -> bool:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(manager.req_to_blocks.get(request.request_id) for manager in managers)


def _reserve_nothing_for_a_request_alone(scheduler: Any) -> None:
    by_vllm = scheduler._inflight_prefill_reserved_blocks

    def inflight_prefill_reserved_blocks(self: Any) -> int:
        if self.running or self._inflight_prefills:
            return int(by_vllm(self))
        return -int(self._spec_decode_step_blocks)  # which vLLM adds

    scheduler._inflight_prefill_reserved_blocks = inflight_prefill_reserved_blocks


def _requeue_failed_transfers(scheduler: Any) -> None:
    from vllm.v1.request import RequestStatus

    by_vllm = scheduler._handle_blocked_waiting_request

    def handle_blocked_waiting_request(self: Any, request: "Request") -> bool:
        waited_for_kv = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        # A request that is skipped in this pass gets into the queue that it belongs to.
        return bool(by_vllm(self, request)) and (not waited_for_kv or self._holds_kv_blocks(request))

    scheduler._handle_blocked_waiting_request = handle_blocked_waiting_request
