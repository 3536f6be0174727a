# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt: decode itself, or a prefill engine."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

from vllm_ascend_pd.core.groups import CacheGroup, TokenGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


def decode_computes(
    request: "Request", num_computed_tokens: int, groups: Sequence[CacheGroup], pool: "BlockPool | None"
) -> bool:
    """Whether decode computes what is left of the prompt itself. It does if its prefix cache has the whole prompt.

    `num_computed_tokens`: how many of the prompt's tokens vLLM takes from decode's prefix cache. `pool`: where the
    blocks of all `groups` are from; None: not known.

    vLLM never takes all of a prompt from its cache, since it needs the last token's logits. So the whole prompt counts
    as cached in two cases:

    - Only the last token is left.
    - The prompt ends with a block, and the blocks that vLLM computes once more are in the cache: the last one, with an
      EAGLE head the last two.
    """
    prompt = int(request.num_prompt_tokens)
    left = prompt - num_computed_tokens
    if left <= 1:
        return True
    # Windows are left out: vLLM keeps those blocks that the tokens after a hit see, not the prompt's last one. That
    # the hit was possible shows that they are there. States have no prefix cache.
    tokens = [(index, group) for index, group in enumerate(groups) if isinstance(group, TokenGroup)]
    decisive = [(index, group) for index, group in tokens if not group.windowed] or tokens
    if pool is None or not decisive:
        return False
    aligned = math.lcm(*(group.span for _, group in tokens))
    end = prompt - prompt % aligned
    if prompt - end > 1 or end - num_computed_tokens > 2 * aligned:
        return False
    for index, group in decisive:
        if group.span % pool.hash_block_size:  # prefix caching is off
            return False
        hashes = BlockHashListWithBlockSize(request.block_hashes, pool.hash_block_size, group.span)
        for number in range(num_computed_tokens // group.span, end // group.span):
            if number >= len(hashes) or pool.get_cached_block(hashes[number], [index]) is None:
                return False
    return True
