# SPDX-License-Identifier: Apache-2.0
"""A prompt that is sent for a ticket, as the scheduler of a prefill engine follows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.computed_prompt import ComputedPrompt


@dataclass
class OutgoingTransfer:
    """A prompt with its ticket, until all ranks have reported it as sent."""

    prompt: ComputedPrompt
    ticket: Ticket
    # By cache group, in tokens: each part of the prompt but the last one ends at a multiple of this.
    align: tuple[int, ...]
    # By cache group: how many tokens of the prompt were handed to the ranks, or are cached on decode.
    sent: list[int]
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
        spans = {
            i: math.lcm(group.span, ticket.span(i)) for i, group in enumerate(groups) if isinstance(group, TokenGroup)
        }
        longest = math.lcm(*spans.values())  # for states, which are sent at the prompt's end
        align = tuple(spans.get(index, longest) for index in range(len(groups)))
        return cls(prompt, ticket, align, sent=[ticket.remote_cached_tokens] * len(groups))

    def parts(self) -> list[tuple[int, int]]:
        """Returns, by cache group, (start, stop) of the tokens that are complete and were not sent.

        Whole blocks leave as they fill up, and the rest with the prompt's last token.
        """
        done, total = self.prompt.done, self.ticket.num_tokens
        stops = [total if done >= total else done - done % align for align in self.align]
        return [(sent, max(sent, stop)) for sent, stop in zip(self.sent, stops, strict=True)]
