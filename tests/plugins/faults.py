# SPDX-License-Identifier: Apache-2.0
"""Transfer engines that fail: the real one, except for writes from certain blocks of certain prompts."""

import sys
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.role import TransferResults
from vllm_ascend_pd.core.step import PrefillStep
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import Flight, TransferError

POISONED_LAYER = 1
"""Index among the rank's tensors: neither the first nor the last."""


def poison_prompts_of(num_tokens: int) -> None:
    """Makes every write of the second layer fail for prompts of exactly `num_tokens` tokens."""
    watched = _Watched(lambda length: POISONED_LAYER if length == num_tokens else None)
    begin = TransferEngine.begin

    def fail_poisoned(self: TransferEngine, session: str, batch: Batch, *others: Any) -> Flight | None:
        if any(source in watched for source in batch[0]):
            raise TransferError(session, "poisoned by the test", retryable=True)
        return begin(self, session, batch, *others)

    TransferEngine.begin = fail_poisoned  # type: ignore[method-assign]


def lose_tensors_of_prompts_from(num_tokens: int) -> None:
    """A prompt of `num_tokens + i` tokens loses the rank's tensor `i` on its way: its writes seem to succeed, but
    never happen. Only where nothing is regrouped: the writes of tensors that are come from elsewhere."""
    watched = _Watched(lambda length: length - num_tokens if length >= num_tokens else None)
    begin = TransferEngine.begin

    def kept(batch: Batch) -> Batch:
        left = [part for part in zip(*batch, strict=True) if part[0] not in watched]
        return [s for s, _, _ in left], [d for _, d, _ in left], [n for _, _, n in left]

    def begin_the_others(self: TransferEngine, session: str, batch: Batch, *others: Any) -> Flight | None:
        left = kept(batch)
        return begin(self, session, left, *others) if left[0] else None

    TransferEngine.begin = begin_the_others  # type: ignore[method-assign]


class _Watched:
    """The memory of the tensor that `tensor_of(prompt length)` names, in the blocks of all prompts it names one for,
    until they are sent."""

    def __init__(self, tensor_of: Callable[[int], int | None]) -> None:
        self._tensor_of = tensor_of
        self._tensors: dict[str, int] = {}  # by request
        self._ranges: dict[str, list[tuple[int, int]]] = {}  # (address, bytes) by request
        start_step, take_results = PrefillWorker.start_step, PrefillWorker.take_results

        def watch_step(worker: PrefillWorker, step: PrefillStep) -> None:
            self._note(worker._caches.description, step)
            start_step(worker, step)

        def watch_sent(worker: PrefillWorker) -> TransferResults:
            results = take_results(worker)
            self._ranges = {each: ranges for each, ranges in self._ranges.items() if each not in results.sent}
            return results

        PrefillWorker.start_step = watch_step  # type: ignore[method-assign]
        PrefillWorker.take_results = watch_sent  # type: ignore[method-assign]

    def __contains__(self, address: int) -> bool:
        return any(begin <= address < begin + n for ranges in self._ranges.values() for begin, n in ranges)

    def _note(self, caches: RankCaches, step: PrefillStep) -> None:
        for request, ticket in step.tickets.items():
            index = self._tensor_of(ticket.num_tokens)
            if index is not None and index < len(caches.tensors):
                self._tensors[request] = index
                print(f"fault injected: {request}: {caches.tensors[index]}", file=sys.stderr, flush=True)
        for send in step.sends:
            if send.request_id in self._tensors:
                tensor = caches.tensors[self._tensors[send.request_id]]
                geometry = caches.geometry_of(tensor)
                ranges = [
                    (tensor.base + b * geometry.block_stride, geometry.block_bytes) for b in send.blocks[geometry.group]
                ]
                self._ranges = self._ranges | {send.request_id: self._ranges.get(send.request_id, []) + ranges}
