# SPDX-License-Identifier: Apache-2.0
"""Patch of the scheduler of vLLM 0.23 to 0.33 on decode: a pause, and a reset of the prefix cache, wait for KV.

`/pause` in the modes "wait" and "keep" counts only requests that run as in flight. Then it resets the prefix cache.
That fails while transfers have blocks, and the exception ends the engine core or leaves the engine paused.

With the patch, the pause is complete only when no transfer is in flight. The reset then also takes the blocks of
requests whose KV has arrived and that have not run since. Like preempted ones, they start from their beginning. Outside
a pause, a reset that preempts running requests answers that it failed, which is vLLM's answer for a caller to try
again, and changes nothing.
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.patches import Method, has_blocks, replace_in_schedulers

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ABOUT_TO_RUN = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_REMOTE_KVS)
"""Of requests that hold blocks and do not run, if no transfer is in flight."""


def install() -> None:
    """Patches the loaded vLLM. May be called again."""
    replace_in_schedulers("has_finished_requests", _with_transfers)
    replace_in_schedulers("reset_prefix_cache", _resetting)


def _with_transfers(by_vllm: Method) -> Method:
    def has_finished_requests(self: Any) -> bool:
        """Whether steps must go on although no request can be scheduled."""
        return bool(by_vllm(self)) or any(_awaits_kv(self, request) for request in self.requests.values())

    return has_finished_requests


def _resetting(by_vllm: Method) -> Method:
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests:
            # vLLM keeps an ended request for as long as its transfer holds its blocks.
            held = sum(_awaits_kv(self, each) or each.is_finished() for each in self.requests.values())
            if held and self.pause_state is PauseState.UNPAUSED:
                return False
            if held:
                raise RuntimeError(
                    f"the prefix cache cannot be emptied: transfers in flight hold the blocks of {held} requests"
                )
            # The last one first: each is put before the others (0.32 and 0.33).
            for request in reversed(self.requests.values()):
                if request.status in _ABOUT_TO_RUN and has_blocks(self, request):
                    _take_back(self, request)
        return bool(by_vllm(self, reset_running_requests, *args, **kwargs))

    return reset_prefix_cache


def _awaits_kv(scheduler: Any, request: "Request") -> bool:
    waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return waits and request.request_id not in scheduler.finished_recving_kv_req_ids


def _take_back(scheduler: Any, request: "Request") -> None:
    """Takes the blocks of a request that is about to run."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduler.finished_recving_kv_req_ids.remove(request.request_id)
        scheduler.failed_recving_kv_req_ids.discard(request.request_id)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
    scheduler.kv_cache_manager.free(request)
    scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0
    if hasattr(scheduler, "kv_holding_waiting"):  # the queue of requests that hold blocks, from 0.32 on
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler.waiting.prepend_request(request)
