# SPDX-License-Identifier: Apache-2.0
"""A prompt that is sent for a ticket, as the scheduler of a prefill engine follows it, and its blocks of windows.

The scheduler's thread owns all of this.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup
from vllm_ascend_pd.core.engine_view import EngineBlocks, ScheduledRequest
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.ticket import Ticket, TicketError


@dataclass
class OutgoingPrompt:
    """The prompt of a request that has a ticket, or that waits for one."""

    request: ScheduledRequest
    # How often vLLM had preempted the request, and whether it was preempted, when the scheduler last looked.
    preempted: tuple[int, bool]
    # Ids of the request's blocks, per cache group. Empty until it is allocated, and while it is preempted.
    blocks: list[list[int]] = field(default_factory=list)
    # Blocks that it had before a preemption. A step that was under way then may say later that it has not loaded them.
    earlier_blocks: set[int] = field(default_factory=set)
    # Tokens computed before the latest step in which the request ran.
    before: int = 0
    # Tokens whose KV is in the blocks at the end of that step, from the first one on and without a gap.
    done: int = 0
    # From which token on vLLM has taken KV back that no step has computed again. None: there is none.
    taken_back: int | None = None
    # Whether no step can compute that again, because blocks of a window may be another request's by now.
    is_lost: bool = False
    # How many tokens of the prompt the prefix cache had when the request ran for the first time. None: it has not run.
    cached_tokens: int | None = None
    # Whether the prompt was cut by its last token, which decode computes.
    is_cut: bool = False
    # Whether vLLM has ended the request. The ranks may still read its blocks.
    ended: bool = False
    # These six are of `HeldPrompts`. What the prompt's ticket will name. None: it waits for none.
    transfer_id: str | None = None
    # How long the blocks of the ended request are held after decode has last asked about its ticket, in seconds.
    hold_s: float = 0.0
    # Until when the blocks of the ended request are held for its ticket, on the monotonic clock.
    hold_until: float | None = None
    # The same, however often decode asks about the ticket.
    hold_latest: float = 0.0
    # Why no ticket is taken any more. None: one is.
    given_up: str | None = None
    # Whether decode has said that it needs no ticket for it.
    is_released: bool = False
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
        self.earlier_blocks.update(block for ids in self.blocks for block in ids)
        self.blocks = [list(ids) for ids in blocks]
        self.before = self.done = 0
        self.taken_back, self.is_lost = None, False

    def compute(self, computed: int, tokens: int) -> None:
        """A step computes `tokens` of the request, after `computed` ones."""
        self.before = computed
        if not self.is_lost and (self.taken_back is None or computed <= self.taken_back):
            self.done, self.taken_back = computed + tokens, None

    def take_back(self, token: int, is_lost: bool) -> None:
        """KV from `token` on is not there, although vLLM had counted it. `is_lost`: as the field."""
        self.done = min(self.done, token)
        self.taken_back = token if self.taken_back is None else min(self.taken_back, token)
        self.is_lost = self.is_lost or is_lost

    def first_token_in(self, blocks: Collection[int], groups: Sequence[CacheGroup]) -> int | None:
        """Returns the first token whose KV is in one of `blocks`; None if there is none.

        Only for one group of attention caches. Otherwise it is the prompt's first one: vLLM computes all of it again.
        """
        numbers = [number for ids in self.blocks for number, block in enumerate(ids) if block in blocks]
        if not numbers:
            return None
        group = groups[0]
        return min(numbers) * group.span if len(groups) == 1 and isinstance(group, TokenGroup) else 0

    def blocks_from(self, token: int, groups: Sequence[CacheGroup]) -> list[int]:
        """Returns all blocks from that of `token` on. `token`: of `first_token_in`."""
        first = token // groups[0].span if token and isinstance(groups[0], TokenGroup) else 0
        return [block for ids in self.blocks for block in ids[first:]]


@dataclass
class OutgoingTransfer:
    """A prompt with its ticket, until all ranks have reported it as sent."""

    prompt: OutgoingPrompt
    ticket: Ticket
    # By cache group, in tokens: each part of the prompt but the last one ends at a multiple of this.
    align: tuple[int, ...]
    # By cache group: how many tokens of the prompt were handed to the ranks, or are cached on decode.
    sent: list[int]
    # Whether the ranks have the ticket.
    announced: bool = False
    # Whether the ranks have all of the prompt.
    complete: bool = False
    # Whether vLLM takes nothing of it back any more. The ranks report success without waiting for the request's end.
    confirmed: bool = False
    # Whether tokens were sent that vLLM took back.
    again: bool = False
    # Whether it was preempted in a step that computed nothing, and the ranks do not know.
    preemption_unreported: bool = False
    # Why the prompt was not sent whole. None: nothing has failed.
    failure: str | None = None

    @classmethod
    def of(cls, prompt: OutgoingPrompt, ticket: Ticket, groups: Sequence[CacheGroup]) -> "OutgoingTransfer":
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

    def take_back(self, token: int) -> None:
        """KV from `token` on is sent again, when it is complete again."""
        cached, before = self.ticket.remote_cached_tokens, self.sent
        if token < self.ticket.num_tokens:
            wholes = [token - token % align for align in self.align]
            self.sent = [max(cached, min(pair)) for pair in zip(before, wholes, strict=True)]
            self.complete = self.confirmed = False
            self.again = self.again or self.sent != before


class WindowHolds:
    """Keeps blocks of windows that decode wants, from when they are computed until they are sent (R3).

    vLLM reuses blocks that have left a window while the request still runs, and all of them when it ends. Sending may
    be later than computing: decode's blocks may be longer and must fill up first, or decode's ticket comes later.

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

    def hold_for(self, ticket: Ticket, prompt: OutgoingPrompt, sent: Sequence[int]) -> None:
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

    def hold_end(self, prompt: OutgoingPrompt) -> None:
        """The prompt is computed and has no ticket: holds what a decode engine with blocks of this length wants."""
        length = prompt.request.num_prompt_tokens
        for index, group in self._windowed:
            if index not in prompt.held_to:
                first, stop = group.seen_from(length - 1) // group.span, math.ceil(length / group.span)
                for number in range(first, stop):
                    self._hold(prompt, prompt.blocks[index][number])
                prompt.held_to[index] = stop

    def check(self, ticket: Ticket, prompt: OutgoingPrompt) -> None:
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

    def _hold(self, prompt: OutgoingPrompt, block: int) -> None:
        if block != NULL_BLOCK:
            self._blocks.hold([block])
            prompt.held.append(block)

    def release(self, prompt: OutgoingPrompt) -> None:
        """Nothing reads the prompt's blocks any more."""
        if prompt.held:
            self._blocks.release(prompt.held)
            prompt.held = []
        prompt.held_to = {}
