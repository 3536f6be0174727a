# SPDX-License-Identifier: Apache-2.0
"""Keeps blocks of windows that decode wants, from when they are computed until they are sent (R3).

vLLM reuses blocks that have left a window while the request still runs, and all of them when it ends. Sending may be
later than computing: decode's blocks may be longer and must fill up first, or decode's ticket comes later.

The scheduler's thread owns this.
"""

import math
from collections.abc import Sequence

from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.step import EngineBlocks
from vllm_ascend_pd.core.ticket import Ticket, TicketError
from vllm_ascend_pd.prefill.outgoing_transfer import ComputedPrompt


class WindowHolds:
    """Holds and releases blocks of the cache groups that see a window.

    groups: the engine's cache groups.
    """

    def __init__(self, groups: Sequence[CacheGroup], blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._windowed = [(i, g) for i, g in enumerate(groups) if isinstance(g, TokenGroup) and g.windowed]

    def __bool__(self) -> bool:
        """Whether a cache group sees a window."""
        return bool(self._windowed)

    def need_whole_prompt(self, ticket: Ticket) -> bool:
        """Whether prefill must compute the whole prompt for this ticket: decode's blocks of a window are longer.

        For a window, vLLM caches only the blocks that the next token sees. Decode's first block begins before those.
        """
        return any(ticket.span(index) > group.span for index, group in self._windowed)

    def hold_for(self, ticket: Ticket, prompt: ComputedPrompt, sent: Sequence[int]) -> None:
        """Holds what decode has blocks for and was not sent. `sent`: how many tokens of the prompt were, by group."""
        for index, group in self._windowed:
            decode_blocks, decode_span = ticket.remote_block_ids[index], ticket.span(index)
            done = min(prompt.done, ticket.num_tokens)
            first = max(prompt.held_to.get(index, 0), sent[index] // group.span)
            stop = max(first, math.ceil(done / group.span))
            for number in range(first, stop):
                begin, end = number * group.span, (number + 1) * group.span
                wanted = decode_blocks[begin // decode_span : math.ceil(end / decode_span)]
                if any(block != NULL_BLOCK for block in wanted):
                    self._hold(prompt, prompt.blocks[index][number])
            prompt.held_to[index] = stop

    def hold_end(self, prompt: ComputedPrompt) -> None:
        """The prompt is computed and has no ticket: holds what a decode engine with blocks of this length wants."""
        length = prompt.request.num_prompt_tokens
        for index, group in self._windowed:
            if index not in prompt.held_to:
                first, stop = group.seen_from(length - 1) // group.span, math.ceil(length / group.span)
                for number in range(first, stop):
                    self._hold(prompt, prompt.blocks[index][number])
                prompt.held_to[index] = stop

    def check(self, ticket: Ticket, prompt: ComputedPrompt) -> None:
        """Raises TicketError if decode wants tokens of a window whose blocks may be another request's by now."""
        length = prompt.request.num_prompt_tokens
        for index, group in self._windowed:
            kept = group.seen_from(length - 1 if index in prompt.held_to else prompt.before) // group.span * group.span
            wanted = next((n for n, block in enumerate(ticket.remote_block_ids[index]) if block != NULL_BLOCK), None)
            if wanted is None or prompt.done == 0:
                continue
            if wanted * ticket.span(index) < kept:
                raise TicketError(
                    f"decode wants tokens from {wanted * ticket.span(index)} on of a window, of which prefill has kept "
                    f"those from {kept} on: the ticket came after they were computed, and decode's blocks are longer"
                )

    def _hold(self, prompt: ComputedPrompt, block: int) -> None:
        if block != NULL_BLOCK:
            self._blocks.hold([block])
            prompt.held.append(block)

    def release(self, prompt: ComputedPrompt) -> None:
        """Nothing reads the prompt's blocks any more."""
        if prompt.held:
            self._blocks.release(prompt.held)
            prompt.held = []
        prompt.held_to = {}
