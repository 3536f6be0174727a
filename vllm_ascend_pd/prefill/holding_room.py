# SPDX-License-Identifier: Apache-2.0
"""Decides when prompts without a ticket start, so that no prompt with a ticket waits for one of them (R11).

A prompt without a ticket keeps its blocks until decode has room for it. That room may be taken by tickets whose prompts
wait for blocks here. So blocks for the longest prompt stay free of prompts without a ticket.

Plain bookkeeping, of the scheduler's thread.
"""

from vllm_ascend_pd.core.caches import BlockNeeds


class HoldingRoom:
    """The blocks that prompts without a ticket may take, and the line of those that wait for them.

    `remove` follows each `add`: when the prompt's ticket has come, or its blocks are freed.
    """

    def __init__(self, needs: BlockNeeds) -> None:
        self._blocks = needs.beside_longest
        self._pool = needs.pool
        # By request id, in the order of arrival: the most blocks that each has at a time. Those that may start, or have
        # started, and those that must wait.
        self._admitted: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        # Those of `_admitted` that leave too few blocks for the longest prompt.
        self._beyond: set[str] = set()

    def add(self, request_id: str, blocks: int) -> None:
        """A prompt without a ticket has come. `blocks`: the most that it has at a time."""
        self._waiting[request_id] = blocks
        self._admit()

    def remove(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._beyond.discard(request_id)
        self._admit()

    def may_start(self, request_id: str) -> bool:
        return request_id not in self._waiting

    def started(self, request_id: str) -> None:
        """A prompt has blocks. vLLM may have started it although it had to wait."""
        if (blocks := self._waiting.pop(request_id, None)) is not None:
            self._admitted[request_id] = blocks
            self._beyond.add(request_id)

    @property
    def beyond(self) -> frozenset[str]:
        """Prompts that have started and leave too few blocks for the longest prompt."""
        return frozenset(self._beyond)

    @property
    def left(self) -> int:
        """Blocks that other prompts can have in all."""
        return self._pool - sum(self._admitted.values())

    def _admit(self) -> None:
        """Admits prompts in their order of arrival. One that never fits beside the longest prompt is admitted alone."""
        while self._waiting:
            request_id, blocks = next(iter(self._waiting.items()))
            fits = sum(self._admitted.values()) + blocks <= self._blocks
            if not fits and self._admitted:
                return
            self._admitted[request_id] = self._waiting.pop(request_id)
            if not fits:
                self._beyond.add(request_id)
