# SPDX-License-Identifier: Apache-2.0
"""A prompt that is sent for a ticket, as the scheduler of a prefill engine follows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup
from vllm_ascend_pd.core.step import ScheduledRequest
from vllm_ascend_pd.core.ticket import Ticket


@dataclass
class ComputedPrompt:
    """The prompt of a request that has a ticket, or that waits for one."""

    request: ScheduledRequest
    # How often vLLM had preempted the request, and whether it was preempted, when the scheduler last looked.
    preempted: tuple[int, bool]
    # Ids of the request's blocks, per cache group. Empty until it is allocated, and while it is preempted.
    blocks: list[list[int]] = field(default_factory=list)
    # Tokens computed before the latest step in which the request ran, and at the end of that step.
    before: int = 0
    done: int = 0
    # How many tokens of the prompt the prefix cache had when the request ran for the first time. None: it has not run.
    cached_tokens: int | None = None
    # Whether the prompt was cut by its last token, which decode computes.
    is_cut: bool = False
    # Whether vLLM has ended the request. The ranks may still read its blocks.
    ended: bool = False
    # These three are of `HeldPrompts`. What the prompt's ticket will name. None: it waits for none.
    transfer_id: str | None = None
    # Until when the blocks of the ended request are held for its ticket, on the monotonic clock.
    hold_until: float | None = None
    # Why no ticket is taken any more. None: one is.
    given_up: str | None = None
    # Blocks of windows that are held for the ranks to read.
    held: list[int] = field(default_factory=list)
    # Cache group -> number of the first block that was not looked at for holding.
    held_to: dict[int, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the latest step computes, or has computed, the prompt's last token."""
        return self.done >= self.request.num_prompt_tokens

    def start(self, blocks: Sequence[Sequence[int]]) -> None:
        """The request has these blocks, per cache group, and has computed nothing in them. None while preempted."""
        self.blocks = [list(ids) for ids in blocks]
        self.before = self.done = 0


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
