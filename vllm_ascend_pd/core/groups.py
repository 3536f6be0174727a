# SPDX-License-Identifier: Apache-2.0
"""Cache groups: which of a request's blocks hold which of its tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class TokenGroup:
    """A group of attention caches: its blocks hold the KV of tokens."""

    # Tokens that a block stands for on one rank.
    block_size: int
    # How many ranks of context parallelism share a request's tokens.
    ranks: int = 1
    # Whether vLLM reuses blocks of tokens that the next token does not see.
    windowed: bool = False
    # How many tokens a token sees, itself included. 0: all, unless `chunk` says otherwise.
    window: int = 0
    # A token sees those of its own chunk of so many tokens. 0: there are no chunks.
    chunk: int = 0
    # Tokens that one entry of a block is computed from: the fewest of the group's layers.
    tokens_per_entry: int = 1
    # Whether blocks hold states and not tokens.
    holds_state = False

    @property
    def span(self) -> int:
        """How many of a request's tokens a block id stands for, on all ranks together."""
        return self.block_size * self.ranks

    @property
    def ticket_block_size(self) -> int:
        """The block size that tickets name for this group."""
        return self.block_size

    def seen_from(self, token: int) -> int:
        """Returns the first token that token number `token` sees."""
        first = [max(0, token + 1 - self.window)] if self.window else []
        if self.chunk:
            first.append(token - token % self.chunk)
        return min(first, default=0)

    def holding(self, blocks: Sequence[int], start: int, stop: int, last: bool) -> list[int]:
        """Returns those of a request's `blocks` that hold tokens `[start, stop)`. `last`: the prompt ends there.

        Tokens after the last complete entry are in no block: vllm-ascend allocates none for them, vLLM may.
        """
        stop -= stop % self.tokens_per_entry
        return list(blocks[start // self.span : math.ceil(stop / self.span)])

    def ticket_blocks(self, blocks: Sequence[int], num_tokens: int) -> list[int]:
        """Returns those of a request's `blocks` that its ticket names. `num_tokens`: of the prompt."""
        return self.holding(blocks, 0, num_tokens, last=True)


@dataclass(frozen=True)
class StateGroup:
    """A group of state caches: a block holds the state after the last computed one of its tokens.

    Only the state after the prompt's last token is sent. Tickets treat it as a block of one token.
    """

    # Tokens per block.
    block_size: int
    holds_state = True
    windowed = False
    ticket_block_size = 1

    def holding(self, blocks: Sequence[int], start: int, stop: int, last: bool) -> list[int]:
        """As in `TokenGroup`. Without `last` there is none."""
        return [blocks[(stop - 1) // self.block_size]] if last else []

    def ticket_blocks(self, blocks: Sequence[int], num_tokens: int) -> list[int]:
        return self.holding(blocks, 0, num_tokens, last=True)


CacheGroup: TypeAlias = TokenGroup | StateGroup


def left_to_decode(groups: Iterable[CacheGroup]) -> int:
    """Returns how many of a prompt's last tokens prefill does not deliver: 0 or 1.

    Decode computes the last token anyway, and KV may be written twice. Two kinds of caches must not have that token
    yet: a state, which has seen all tokens before it; and a window, since vLLM keeps the blocks that the next token
    after the received ones sees, and that token must be the last one.
    """
    return int(any(group.holds_state or group.windowed for group in groups))
