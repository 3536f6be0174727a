# SPDX-License-Identifier: Apache-2.0
"""A transfer engine that fails one layer of one request: the real one, except for writes from poisoned blocks."""

from vllm_ascend_pd.step import ProducerStep
from vllm_ascend_pd.transport.engine import TransferEngine, TransferError
from vllm_ascend_pd.worker.producer import ProducerWorker

POISONED_LAYER = 1
"""Index among the rank's tensors: neither the first nor the last."""


def poison_prompts_of(num_tokens: int) -> None:
    """Prompts of exactly `num_tokens` tokens cannot be sent: every write of their second layer fails."""
    poisoned: set[str] = set()
    ranges: list[tuple[int, int]] = []
    start_step, write = ProducerWorker.start_step, TransferEngine.write

    def watch_step(self: ProducerWorker, step: ProducerStep) -> None:
        poisoned.update(r for r, ticket in step.tickets.items() if ticket.num_tokens == num_tokens)
        caches = self._caches.description
        tensor = caches.tensors[POISONED_LAYER]
        geometry = caches.geometry_of(tensor)
        ranges.clear()
        for send in step.sends:
            if send.request_id in poisoned:
                blocks = send.blocks[geometry.group]
                ranges.extend((tensor.base + b * geometry.block_stride, geometry.block_bytes) for b in blocks)
        start_step(self, step)

    def fail_poisoned(
        self: TransferEngine, session: str, sources: list[int], destinations: list[int], lengths: list[int]
    ) -> None:
        if any(begin <= source < begin + size for source in sources for begin, size in ranges):
            raise TransferError(session, "poisoned by the test", retryable=True)
        write(self, session, sources, destinations, lengths)

    ProducerWorker.start_step = watch_step  # type: ignore[method-assign]
    TransferEngine.write = fail_poisoned  # type: ignore[method-assign]
