# SPDX-License-Identifier: Apache-2.0
"""Patch of the scheduler of vLLM 0.23 to 0.33 on prefill, for layers that see a window: a reset of the prefix cache.

Prefill holds blocks that have left a window until they were sent (`prefill/outgoing_transfer.py`). A reset that
preempts running requests, such as that of `/pause` in the mode "keep", found these blocks in use. vLLM takes that for
its own error, and the exception may end the engine core.

With the patch, what is held for running requests is released first. Ranks stop reading it with all other blocks of
preempted requests, before any of them is used again.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.patches import Method, replace_in_schedulers

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_RELEASE = "release_window_holds"
"""Attribute of a block pool: releases what is held for the requests with these ids."""


def bind_window_holds(pool: "BlockPool", release: Callable[[Collection[str]], None]) -> None:
    """The scheduler with this block pool calls `release` with the ids of requests that it is about to preempt so."""
    setattr(pool, _RELEASE, release)


def install() -> None:
    """Patches all schedulers that are loaded. May be called again."""
    replace_in_schedulers("reset_prefix_cache", _releasing)


def _releasing(by_vllm: Method) -> Method:
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        release = getattr(self.kv_cache_manager.block_pool, _RELEASE, None)
        if reset_running_requests and release is not None:
            release([request.request_id for request in self.running])
        return bool(by_vllm(self, reset_running_requests, *args, **kwargs))

    return reset_prefix_cache
