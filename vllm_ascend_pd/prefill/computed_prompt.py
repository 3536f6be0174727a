# SPDX-License-Identifier: Apache-2.0
"""How far a prefill engine has computed a request's prompt, and in which blocks. The scheduler's thread owns it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.core.step import ScheduledRequest


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
