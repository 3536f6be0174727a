# SPDX-License-Identifier: Apache-2.0
"""Patch of the scheduler of vLLM 0.32 and 0.33 on decode: a request whose KV has arrived, or was lost, can always run.

These versions schedule waiting requests that hold blocks first, from a queue of their own, and leave blocks for their
first steps. So most of what 0.30 is patched for is right. They still deadlock in three ways:

- After a failed transfer, with `kv_load_failure_policy` recompute, a request has no blocks any more, but stays first in
  the queue of those that hold some. If it does not fit, none behind it is looked at.
- vLLM goes on to leave blocks for such a request before it starts another transfer, although it waits like any other
  one. So a transfer before it in the queue may never start, nor may requests behind that transfer.
- Before a transfer starts, vLLM wants free blocks for the drafts of its first step, beyond `max_model_len`, too. The
  longest requests may need more blocks then than there are.

With the patch, a request that has lost its blocks goes to the other queue, as its first one, and no blocks are left for
it. Blocks beyond `max_model_len` do not count.
"""

import math
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.patches import Method, has_blocks, replace, replace_in_schedulers

if TYPE_CHECKING:
    from vllm.v1.request import Request

_STEP = "tokens_of_a_step_with_drafts"
"""Attribute of a scheduler's `KVCacheManager`: for how many tokens vLLM leaves blocks beside a transfer's own."""


def fits(scheduler: Any) -> bool:
    """Whether vLLM's scheduler has a queue of its own for requests that hold blocks."""
    return hasattr(scheduler, "_handle_blocked_waiting_request") and hasattr(scheduler, "_holds_kv_blocks")


def install() -> None:
    """Patches the loaded vLLM. May be called again."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    replace_in_schedulers("_handle_blocked_waiting_request", _leaving_the_queue)
    replace_in_schedulers("_inflight_prefill_reserved_blocks", _noting_drafts)
    replace(KVCacheManager, "allocate_slots", _within_the_longest)


def _leaving_the_queue(by_vllm: Method) -> Method:
    def handle_blocked_waiting_request(self: Any, request: "Request") -> bool:
        """Whether the request may be scheduled. If not, vLLM puts it back into the queue that it belongs to."""
        had_transfer = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        ready = bool(by_vllm(self, request))
        if not (had_transfer and ready) or has_blocks(self, request):
            return ready
        self._inflight_prefills.discard(request)
        return False

    return handle_blocked_waiting_request


def _noting_drafts(by_vllm: Method) -> Method:
    # vLLM calls this for a transfer, right before it allocates.
    def inflight_prefill_reserved_blocks(self: Any) -> int:
        drafts = self.num_spec_tokens
        setattr(self.kv_cache_manager, _STEP, 1 + drafts + self.num_lookahead_tokens if drafts else 0)
        return int(by_vllm(self))

    return inflight_prefill_reserved_blocks


def _within_the_longest(by_vllm: Method) -> Method:
    def allocate_slots(
        self: Any,
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        reserved_blocks: int = 0,
        **kwargs: Any,
    ) -> Any:
        if delay_cache_blocks and (step := getattr(self, _STEP, 0)):  # a transfer
            known = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
            for manager in self.coordinator.single_type_managers:
                if not isinstance(manager.kv_cache_spec, MambaSpec):
                    size = manager.block_size
                    left = math.ceil(self.max_model_len / size) - math.ceil(known / size)
                    reserved_blocks -= max(0, math.ceil(step / size) - left)
        return by_vllm(
            self,
            request,
            num_new_tokens,
            num_new_computed_tokens,
            *args,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            reserved_blocks=reserved_blocks,
            **kwargs,
        )

    return allocate_slots
