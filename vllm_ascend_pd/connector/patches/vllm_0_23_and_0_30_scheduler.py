# SPDX-License-Identifier: Apache-2.0
"""Patch of the scheduler of vLLM 0.23 and 0.30 on decode: a request whose KV has arrived can always run.

Requests that wait for KV, or whose KV has arrived, hold blocks and cannot be preempted. If none of them can start and
nothing runs, no block is ever freed. These versions deadlock like this in two ways:

- A transfer gets blocks for its tokens only. The first step needs more: for the tokens of drafts, or for a last prompt
  token that is not transferred. Several such requests may each wait for a block of another one.
- The first waiting request that does not fit ends the scheduler's pass. It may hold no blocks yet (its grammar has just
  been compiled, or its priority is higher) and come before requests whose KV has arrived.

With the patch, a transfer gets all blocks of its first step together with its own, and requests whose KV has arrived
are scheduled before those that hold no blocks.

Before a transfer starts, vLLM also wants more free blocks than its own: those that other requests will need. It counts
a request whose transfer failed and which has lost its blocks, although that one waits like any other. So a transfer
before it in the queue may never start, nor may requests behind that transfer. The patch counts it no more. Nor does it
count a request with more blocks of cached states than its tokens need as one that gives blocks back.

vllm-ascend's schedulers call the patched methods from their own `schedule()`, too, so the patch holds for all of them.
"""

import math
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOOKAHEAD = "lookahead_of_first_steps"
"""Attribute of a scheduler's `KVCacheManager`: how many tokens behind a request's last one its first step needs blocks
for, without those that it computes, and how many it computes."""


class _Candidate:
    """A queue whose next request is `request`, which may be anywhere in `queue`."""

    def __init__(self, queue: Any, request: "Request") -> None:
        self._queue = queue
        self._request = request

    def peek_request(self) -> "Request":
        return self._request

    def pop_request(self) -> "Request":
        self._queue.remove_request(self._request)
        return self._request


def fits(scheduler: Any) -> bool:
    """Whether vLLM's scheduler chooses between two queues, of new and of skipped requests."""
    return hasattr(scheduler, "_select_waiting_queue_for_scheduling")


def install() -> None:
    """Patches the loaded vLLM. May be called again."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    # vllm-ascend puts a subclass in Scheduler's place. Other subclasses may be of the original one.
    original = next(each for each in Scheduler.__mro__ if "_select_waiting_queue_for_scheduling" in vars(each))
    if original._select_waiting_queue_for_scheduling.__module__ == __name__:
        return
    _schedule_arrived_requests_first(original)
    _release_reservations_of_failed_transfers(original)
    _reserve_no_negative_blocks(original)
    _allocate_first_steps_with_transfers(KVCacheManager)


def _schedule_arrived_requests_first(scheduler: Any) -> None:
    by_vllm = scheduler._select_waiting_queue_for_scheduling

    def select_waiting_queue_for_scheduling(self: Any) -> Any:
        setattr(self.kv_cache_manager, _LOOKAHEAD, (self.num_lookahead_tokens, _padding(self)))
        queue = by_vllm(self)
        if queue is None or not self.skipped_waiting:
            return queue
        head = queue.peek_request()
        if _is_skipped(self, head) or _has_arrived(self, head):
            return queue
        by_arrival = self.policy.value == "fcfs"
        arrived = [request for request in self.skipped_waiting if _has_arrived(self, request)]
        if arrived:
            return _Candidate(self.skipped_waiting, arrived[0] if by_arrival else min(arrived))
        # Otherwise requests with grammars overtake all others for as long as new ones come.
        if by_arrival and self.waiting and self.waiting.peek_request().arrival_time < head.arrival_time:
            return self.waiting
        return queue

    scheduler._select_waiting_queue_for_scheduling = select_waiting_queue_for_scheduling


def _padding(scheduler: Any) -> int:
    """Returns how many tokens are added to the first step of a request whose KV has arrived.

    vLLM 0.30 gives such a request as many draft positions as others have, if their number never changes.
    """
    fixed = hasattr(scheduler, "dynamic_sd_lookup") and scheduler.dynamic_sd_lookup is None
    return int(scheduler.num_spec_tokens) if fixed else 0


def _is_skipped(scheduler: Any, request: "Request") -> bool:
    """Whether the request cannot run yet, so that the scheduler's pass skips it."""
    match request.status:
        case RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id not in scheduler.finished_recving_kv_req_ids
        case RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            grammar = request.structured_output_request
            return grammar is None or not grammar.grammar
        case RequestStatus.WAITING_FOR_STREAMING_REQ:
            return True
        case _:
            return False


def _has_arrived(scheduler: Any, request: "Request") -> bool:
    """Whether the request's KV has arrived, and it holds all blocks of its first step.

    A session whose input goes on (`resumable`) may need more blocks.
    """
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.resumable:
        return False
    return has_blocks(scheduler, request)


def _allocate_first_steps_with_transfers(manager: Any) -> None:
    by_vllm = manager.allocate_slots

    def allocate_slots(
        self: Any,
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        *args: Any,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        **kwargs: Any,
    ) -> Any:
        lookahead = getattr(self, _LOOKAHEAD, None)
        if delay_cache_blocks and lookahead is not None:  # a transfer
            known = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
            num_lookahead_tokens, padding = lookahead
            num_new_tokens += max(0, request.num_tokens - known - num_new_tokens) + padding
            # Of cached states, vLLM counts one block for all tokens, and one that was found in the prefix cache. But a
            # transfer has one of its own in the place of that, and its first step another one where a block begins.
            for index, each in enumerate(self.coordinator.single_type_managers):
                if getattr(each, "mamba_cache_mode", "") == "align":
                    begun = math.ceil((known + num_new_tokens) / each.block_size) - math.ceil(known / each.block_size)
                    found = new_computed_blocks.blocks[index] if new_computed_blocks else ()
                    counted = each._get_num_evictable_blocks(found)
                    kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + begun - counted
        return by_vllm(
            self,
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            *args,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            **kwargs,
        )

    manager.allocate_slots = allocate_slots


def _release_reservations_of_failed_transfers(scheduler: Any) -> None:
    """Reserves no blocks for a request that has lost its own."""
    by_vllm = scheduler._update_waiting_for_remote_kv

    def update_waiting_for_remote_kv(self: Any, request: "Request") -> None:
        by_vllm(self, request)
        if not has_blocks(self, request):
            self._inflight_prefills.discard(request)

    scheduler._update_waiting_for_remote_kv = update_waiting_for_remote_kv


def _reserve_no_negative_blocks(scheduler: Any) -> None:
    by_vllm = scheduler._request_remaining_blocks

    def request_remaining_blocks(self: Any, request: "Request") -> int:
        return max(0, int(by_vllm(self, request)))

    scheduler._request_remaining_blocks = request_remaining_blocks


def has_blocks(scheduler: Any, request: "Request") -> bool:
    """Whether the request holds KV blocks, of any cache group."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(manager.req_to_blocks.get(request.request_id) for manager in managers)
