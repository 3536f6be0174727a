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
count, on 0.30, a request with more blocks of cached states than its tokens need as one that gives blocks back.

vllm-ascend's schedulers call the patched methods from their own `schedule()`, too, so the patch holds for all of them.
"""

import math
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.patches import Method, has_blocks, replace
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOOKAHEAD = "lookahead_of_first_steps"
"""Attribute of a scheduler's `KVCacheManager`: how many tokens behind a request's last one its first step needs blocks
for, without those that it computes, and how many it computes."""

_ARRIVED = "arrived_requests"
"""Attribute of a scheduler's `KVCacheManager`: the requests, by id and in queue order, whose KV had arrived when the
scheduler's pass began and which the pass has not looked at. None between the start of a step and the pass."""

_VLLMS_ORDER: dict[str, "Request"] = {}
"""In place of these requests: none had arrived, and only skipped ones waited. So the pass goes in vLLM's order."""

_PROMOTED = "promoted_requests"
"""Attribute of a scheduler: ids of requests whose transfer has ended and which held blocks then."""

_PROMOTED_STATUSES = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


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
    replace(original, "_select_waiting_queue_for_scheduling", _arrived_requests_first)
    replace(original, "_update_waiting_for_remote_kv", _following_ended_transfers)
    if HAS_TRANSFER_RESULTS:  # 0.23 keeps no blocks for drafts of first steps, and counts none below 0
        replace(original, "_request_remaining_blocks", _not_negative)
    replace(KVCacheManager, "allocate_slots", _first_steps_with_transfers)
    replace(KVCacheManager, "new_step_starts", _each_pass_anew)


def _not_negative(by_vllm: Method) -> Method:
    def request_remaining_blocks(self: Any, request: "Request") -> int:
        """Of a request with more blocks of cached states than its tokens need, vLLM counts those beyond as free."""
        return max(0, int(by_vllm(self, request)))

    return request_remaining_blocks


def _arrived_requests_first(by_vllm: Method) -> Method:
    # vLLM calls this for each waiting request of each step, so what holds for the whole pass is found once.
    def select_waiting_queue_for_scheduling(self: Any) -> Any:
        manager = self.kv_cache_manager
        arrived = getattr(manager, _ARRIVED, None)
        if arrived is None:
            setattr(manager, _LOOKAHEAD, (self.num_lookahead_tokens, _padding(self)))
            arrived = _arrived_requests(self)
            if not arrived and not self.waiting:
                arrived = _VLLMS_ORDER
            setattr(manager, _ARRIVED, arrived)
        queue = by_vllm(self)
        if arrived is _VLLMS_ORDER or queue is None or not (arrived or self.waiting):
            return queue
        head = queue.peek_request()
        if arrived.pop(head.request_id, None) is not None or _is_skipped(self, head):
            return queue
        if arrived:
            return _Candidate(self.skipped_waiting, arrived.pop(next(iter(arrived))))
        # Otherwise requests with grammars overtake all others for as long as new ones come.
        if _by_arrival(self) and self.skipped_waiting and self.waiting.peek_request().arrival_time < head.arrival_time:
            return self.waiting
        return queue

    return select_waiting_queue_for_scheduling


def _arrived_requests(scheduler: Any) -> dict[str, "Request"]:
    """Returns the skipped requests whose KV has arrived and which hold all blocks of their first step, in queue order.

    Without a session whose input goes on (`resumable`): it may need more blocks.
    """
    promoted: set[str] = getattr(scheduler, _PROMOTED, set())
    for request_id in [*promoted]:
        request = scheduler.requests.get(request_id)
        if request is None or request.status not in _PROMOTED_STATUSES or not has_blocks(scheduler, request):
            promoted.discard(request_id)
    arrived = scheduler.finished_recving_kv_req_ids | promoted
    if not arrived:
        return {}
    if _by_arrival(scheduler):
        queue = scheduler.skipped_waiting
    else:  # a queue by priority would sort all its requests
        queue = sorted(scheduler.requests[each] for each in arrived)
    return {
        request.request_id: request
        for request in queue
        if request.request_id in arrived and not (request.resumable and request.status in _PROMOTED_STATUSES)
    }


def _by_arrival(scheduler: Any) -> bool:
    """Whether requests are scheduled in the order of their arrival, not by priority."""
    return bool(scheduler.policy is SchedulingPolicy.FCFS)


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


def _first_steps_with_transfers(by_vllm: Method) -> Method:
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

    return allocate_slots


def _each_pass_anew(by_vllm: Method) -> Method:
    def new_step_starts(self: Any) -> None:
        setattr(self, _ARRIVED, None)
        by_vllm(self)

    return new_step_starts


def _following_ended_transfers(by_vllm: Method) -> Method:
    """Notes requests that hold blocks after their transfer. Reserves no blocks for one that has lost its own."""

    def update_waiting_for_remote_kv(self: Any, request: "Request") -> None:
        by_vllm(self, request)
        if has_blocks(self, request):
            vars(self).setdefault(_PROMOTED, set()).add(request.request_id)
        else:
            self._inflight_prefills.discard(request)

    return update_waiting_for_remote_kv
