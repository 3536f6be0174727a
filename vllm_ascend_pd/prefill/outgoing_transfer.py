# SPDX-License-Identifier: Apache-2.0
"""A prompt that is sent for a ticket, as the scheduler of a prefill engine follows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.groups import CacheGroup, TokenGroup
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.computed_prompt import ComputedPrompt


@dataclass
class OutgoingTransfer:
    """A prompt with its ticket, until all ranks have reported it as sent."""

    prompt: ComputedPrompt
    ticket: Ticket
    # Tokens: each part of the prompt but the last one ends at a multiple of this.
    align: int
    # How many tokens of the prompt were handed to the ranks, or are cached on decode.
    sent: int
    # Whether the ranks have the ticket.
    announced: bool = False
    # Whether the ranks have all of the prompt.
    complete: bool = False
    # Whether it was preempted in a step that computed nothing, and the ranks do not know.
    preemption_unsaid: bool = False
    # Why the prompt was not sent whole. None: nothing has failed.
    failure: str | None = None

    @classmethod
    def of(cls, prompt: ComputedPrompt, ticket: Ticket, groups: Sequence[CacheGroup]) -> "OutgoingTransfer":
        """The transfer of a prompt of an engine with these cache groups."""
        own_spans = [group.span for group in groups if isinstance(group, TokenGroup)]
        align = math.lcm(*own_spans, *(ticket.span(index) for index in range(len(groups))))
        return cls(prompt, ticket, align, sent=ticket.remote_cached_tokens)
