# SPDX-License-Identifier: Apache-2.0
"""Which of a prompt's tokens count as cached, in vLLM's own record of the request.

vLLM keeps the figure in `Request.prefill_stats`, hands it out with the first token, and puts it into `usage`. It counts
whatever a connector delivers. Here a token counts only if no engine had to compute it for this request.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def found(request: "Request") -> int:
    """How many tokens of its prompt this engine had when it was last scheduled from the beginning: in its prefix cache,
    or in a pool that another connector reads. 0 once the first token is out."""
    return 0 if request.prefill_stats is None else max(0, int(request.prefill_stats.num_cached_tokens))


def count_prefills(request: "Request", cached_tokens: int) -> None:
    """Prefill delivered the prompt, of which it had `cached_tokens` in its cache. A single engine computes at least the
    last token, so that one never counts."""
    if request.prefill_stats is not None:
        request.prefill_stats.num_cached_tokens = max(0, min(cached_tokens, request.num_prompt_tokens - 1))


def count_own(request: "Request") -> None:
    """Prefill delivered nothing: this engine computes what it did not have itself."""
    if (prefill := request.prefill_stats) is not None:
        prefill.set(prefill.num_prompt_tokens, prefill.num_local_cached_tokens, 0)
