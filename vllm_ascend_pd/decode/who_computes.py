# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt: decode itself, or a prefill engine."""

import math
from collections.abc import Sequence

from vllm_ascend_pd.core.engine_view import EngineBlocks, ScheduledRequest
from vllm_ascend_pd.core.groups import CacheGroup, TokenGroup


def decode_computes(
    request: ScheduledRequest, num_computed_tokens: int, groups: Sequence[CacheGroup], blocks: EngineBlocks
) -> bool:
    """Whether decode computes the rest of the prompt itself: only if its prefix cache has the whole prompt.

    `num_computed_tokens`: how many of the prompt's tokens the engine takes from its prefix cache.

    The engine never takes all of a prompt from its cache, since it needs the last token's logits. So the whole prompt
    counts as cached in two cases:

    - Only the last token is left.
    - The prompt ends with a block, and the cache has the blocks that the engine computes once more: the last one, or
      the last two with an EAGLE head.
    """
    prompt = request.num_prompt_tokens
    if prompt - num_computed_tokens <= 1:
        return True
    # Windows are left out if there are other groups. For a window, the engine keeps the blocks that the tokens after a
    # hit see, and not the prompt's last one. These are there, or the hit would end earlier. States have no prefix
    # cache.
    tokens = [(index, group) for index, group in enumerate(groups) if isinstance(group, TokenGroup)]
    decisive = [(index, group) for index, group in tokens if not group.windowed] or tokens
    if not decisive:
        return False
    aligned = math.lcm(*(group.span for _, group in tokens))
    end = prompt - prompt % aligned
    if prompt - end > 1 or end - num_computed_tokens > 2 * aligned:
        return False
    return all(
        blocks.are_cached(request, index, group.span, num_computed_tokens // group.span, end // group.span)
        for index, group in decisive
    )
