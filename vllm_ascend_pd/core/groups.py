# SPDX-License-Identifier: Apache-2.0
"""Cache groups: how a request's blocks follow from its tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class TokenGroup:
    """A block holds the KV of `block_size` tokens on each of the `ranks` that share a request's tokens. `windowed`: of
    tokens that the next one does not see, vLLM gives blocks away."""

    block_size: int
    ranks: int = 1
    windowed: bool = False
    holds_state = False

    @property
    def span(self) -> int:
        """How many of a request's tokens a block id stands for."""
        return self.block_size * self.ranks

    @property
    def ticket_block_size(self) -> int:
        """What tickets say of the group's blocks."""
        return self.block_size

    def holding(self, blocks: Sequence[int], start: int, stop: int, last: bool) -> list[int]:
        """Those of a request's `blocks` that hold tokens `[start, stop)`; `last`: the prompt ends there."""
        return list(blocks[start // self.span : math.ceil(stop / self.span)])

    def ticket_blocks(self, blocks: Sequence[int], num_tokens: int) -> list[int]:
        """Those of a request's `blocks` that its ticket names, for a prompt of `num_tokens`."""
        return self.holding(blocks, 0, num_tokens, last=True)


@dataclass(frozen=True)
class StateGroup:
    """A block holds the state after the last of its `block_size` tokens that was computed. Only the one after the
    prompt's last token is sent: tickets treat it as a block of one token."""

    block_size: int
    holds_state = True
    windowed = False
    ticket_block_size = 1

    def holding(self, blocks: Sequence[int], start: int, stop: int, last: bool) -> list[int]:
        return [blocks[(stop - 1) // self.block_size]] if last else []

    def ticket_blocks(self, blocks: Sequence[int], num_tokens: int) -> list[int]:
        return self.holding(blocks, 0, num_tokens, last=True)


CacheGroup: TypeAlias = TokenGroup | StateGroup
