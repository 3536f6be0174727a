# SPDX-License-Identifier: Apache-2.0
"""Patch of the scheduler of vLLM 0.23 to 0.33 on decode: a pass does not look at requests that wait for prefill.

vLLM has no such answer of a connector. Where it says None, vLLM looks the prompt up in the prefix cache and asks again,
in every step: 10 to 80 ms a step for 1,000 requests. So they are out of the queues while a step is scheduled. Counts
and aborts see whole queues.
"""

import heapq
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.patches import replace_in_schedulers

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_HIDDEN = "requests_without_news_of_connector"
"""Attribute of a block pool: returns the ids of requests that a pass need not look at."""
_QUEUES = ("waiting", "skipped_waiting")


def bind_hidden(pool: "BlockPool", hidden: Callable[[], Set[str]]) -> None:
    """The scheduler with this block pool does not look at the waiting requests that `hidden` names."""
    setattr(pool, _HIDDEN, hidden)


def install() -> None:
    """Patches all schedulers that are loaded. May be called again."""
    replace_in_schedulers("schedule", _without_hidden)


def _without_hidden(by_scheduler: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden: Set[str] = getattr(self.kv_cache_manager.block_pool, _HIDDEN, set)()
        if not hidden:
            return by_scheduler(self, *args, **kwargs)
        queues = [queue for name in _QUEUES if (queue := getattr(self, name, None)) is not None]
        taken = [_take_out(queue, hidden) for queue in queues]
        try:
            return by_scheduler(self, *args, **kwargs)
        finally:
            for queue, requests in zip(queues, taken, strict=True):
                _put_back(queue, requests)

    return schedule


def _take_out(queue: Any, hidden: Set[str]) -> list[Any]:
    """Returns the queue's hidden requests, in order."""
    by_priority = hasattr(queue, "_heap")
    order = list(queue._heap if by_priority else queue)
    taken = [request for request in order if request.request_id in hidden]
    if taken:
        _fill(queue, [request for request in order if request.request_id not in hidden])
    return taken


def _put_back(queue: Any, taken: list[Any]) -> None:
    """Puts them in their places by arrival. Others may have come meanwhile: vLLM puts those in front."""
    if not taken:
        return
    if hasattr(queue, "_heap"):
        _fill(queue, [*queue._heap, *taken])
    else:
        _fill(queue, list(heapq.merge(taken, queue, key=lambda request: request.arrival_time)))


def _fill(queue: Any, requests: list[Any]) -> None:
    if hasattr(queue, "_heap"):
        queue._heap = requests
        heapq.heapify(queue._heap)
    else:
        queue.clear()
        queue.extend(requests)
