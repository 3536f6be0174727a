# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt: decode itself, or a prefill engine. It is decided here, once per request, and nowhere else."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_ascend_pd.core.engine_view import EngineBlocks, ScheduledRequest
from vllm_ascend_pd.core.groups import CacheGroup, TokenGroup


class Reason(enum.StrEnum):
    """Why a prompt is computed where it is."""

    # Decode's prefix cache has the whole prompt.
    CACHED = "cached"
    # The request was preempted. Its client has tokens already, and prefill could still fail.
    PREEMPTED = "preempted"
    # The request's KV did not arrive, and an engine that computes no prompts asks prefill once more.
    KV_LOST = "kv_lost"
    # The request asks for log probabilities of its prompt, which the engine that answers has to compute.
    PROMPT_LOGPROBS = "prompt_logprobs"
    # Prefill computes prompts, unless something else is the case.
    POLICY = "policy"


@dataclass(frozen=True)
class Decision:
    """Who computes a prompt's tokens that decode does not have cached."""

    # Whether decode does. Otherwise prefill does.
    by_decode: bool
    reason: Reason


@dataclass(frozen=True)
class PlacementSettings:
    """What the configuration says about who computes prompts. The fields are keys of `core/config.py`."""

    who_computes: Literal["auto", "prefill", "never"] = "prefill"
    decode_prompt_tokens: int | None = None
    decode_prompt_share: float = 0.1
    max_decode_prompt_tokens: int = 16384


class PromptPlacement:
    """Decides who computes a prompt. The scheduler's thread owns it.

    groups: the engine's cache groups.
    blocks: answers questions about the engine's KV blocks.
    settings: what the configuration says.
    """

    def __init__(self, groups: Sequence[CacheGroup], blocks: EngineBlocks, settings: PlacementSettings) -> None:
        self._groups = list(groups)
        self._blocks = blocks
        self._settings = settings

    @property
    def computes_no_prompt(self) -> bool:
        """Whether decode computes no prompt whatever happens."""
        return self._settings.who_computes == "never"

    def decide(self, request: ScheduledRequest, num_computed_tokens: int, kv_lost: bool = False) -> Decision:
        """Decides for a request that asks for a prefill. Has no side effects.

        `num_computed_tokens`: how many of the prompt's tokens the engine takes from its prefix cache.
        `kv_lost`: whether prefill was asked, and its KV did not arrive.
        """
        if self.computes_no_prompt:
            if request.num_tokens - num_computed_tokens <= 1:  # what is left is a decode step
                return Decision(True, Reason.CACHED)
            if kv_lost:
                return Decision(False, Reason.KV_LOST)
            return Decision(False, Reason.PREEMPTED if request.num_output_tokens else Reason.POLICY)
        if request.num_output_tokens:
            return Decision(True, Reason.PREEMPTED)
        if request.skip_reading_prefix_cache:
            return Decision(True, Reason.PROMPT_LOGPROBS)
        if is_cached(request, num_computed_tokens, self._groups, self._blocks):
            return Decision(True, Reason.CACHED)
        return Decision(False, Reason.POLICY)


def is_cached(
    request: ScheduledRequest, num_computed_tokens: int, groups: Sequence[CacheGroup], blocks: EngineBlocks
) -> bool:
    """Whether decode's prefix cache has the whole prompt.

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
