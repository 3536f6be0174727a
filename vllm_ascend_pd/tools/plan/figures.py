# SPDX-License-Identifier: Apache-2.0
"""The result of `vllm-ascend-pd plan`. Sizes are in bytes, times in milliseconds."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.model import ModelShape

PROMPT_TOKENS = 1000
"""Length of the prompt that the figures are for, in tokens."""


class RankPosition(NamedTuple):
    """The position of a rank within its engine."""

    pp_rank: int
    tp_rank: int


class Staging(msgspec.Struct, frozen=True):
    """Memory that each prefill rank reserves for regrouping. All figures are 0 if no request can need it."""

    step_tokens: int  # tokens of a step, a layer of which fits into a slot
    slots: int
    slot_bytes: int
    total_bytes: int  # of all slots, and of two buffers of a slot's size for the all-to-all
    groups: int  # all-to-all groups that a rank belongs to
    communicator_bytes: int  # that HCCL takes for these groups on an NPU; not in `total_bytes`


@dataclass
class Flow:
    """The writes of one prefill rank to one decode rank for a prompt."""

    source: RankPosition
    target: RankPosition
    lane: int  # index among the prefill ranks with the same heads and decode ranks. It serves prompts of this index
    exchanging: int  # ranks of the source's all-to-all, including itself; 1 if there is none
    # Descriptors by layer, each a count by size in bytes: with no two blocks of the prompt adjacent, and with all.
    scattered: dict[int, Counter[int]] = field(default_factory=dict)
    contiguous: dict[int, Counter[int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(map(size_of, self.scattered.values()))

    @property
    def descriptors(self) -> int:
        return sum(each.total() for each in self.scattered.values())

    @property
    def descriptors_contiguous(self) -> int:
        return sum(each.total() for each in self.contiguous.values())


def size_of(descriptors: Mapping[int, int]) -> int:
    """Returns the bytes of descriptors that are counted by size."""
    return sum(size * count for size, count in descriptors.items())


class PromptFigures(msgspec.Struct, frozen=True):
    """The transfer of one prompt."""

    tokens: int
    units: int  # whole units that the prompt is transferred as
    flows: tuple[Flow, ...]
    nbytes: int  # of all ranks
    busiest_sender: int  # maximum bytes that one prefill rank sends
    busiest_reader: int  # maximum bytes that one decode rank receives
    descriptors: int  # of all ranks, if no two blocks are adjacent
    descriptors_contiguous: int  # of all ranks, if all blocks are adjacent


class WriteTime(msgspec.Struct, frozen=True):
    """What the writes of one layer of the prompt take the prefill rank whose writes take longest.

    By published figures of one chip, link and engine of HIXL, or by the doctor's (`write_costs.py`).
    """

    chip: str  # "measured" by the doctor
    link: str
    engine: str
    contiguous_ms: float  # if all blocks of the prompt are adjacent
    scattered_ms: float  # if no two blocks are adjacent
    # What the layer's all-to-all takes at the highest rate within a machine. 0: there is none. None: unknown rate.
    exchange_ms: float | None
    limited_by: (
        str  # "all-to-all" if it takes longer than scattered writes, else what those take: "descriptors" or "link"
    )


class RateFigures(msgspec.Struct, frozen=True):
    """Requests per second that each part of one prefill engine and of one decode engine can serve at most.

    An engine here has all its data-parallel ranks.
    """

    prefill_compute: float
    prefill_link: float
    decode_steps: float
    decode_kv: float  # by the KV cache's capacity
    decode_link: float
    prefill_per_decode: float  # prefill engines that keep one decode engine busy


class PlanFigures(msgspec.Struct, frozen=True):
    """The whole result."""

    model: ModelShape
    bytes_per_token: float  # windows of compressed caches are not counted
    window_bytes: int  # of the compressed caches of all layers, once per prompt
    bytes_per_token_and_layer: float  # the most of any layer
    prefill: PlannedEngine
    decode: PlannedEngine
    decode_bytes: float  # per token, on a decode rank of the stage with the most
    unit_tokens: int  # the smaller block size of the two sides
    lanes: int  # prefill ranks with the same heads and decode ranks, which serve prompts in turn
    regrouping: tuple[str, ...]  # exchanged, dealt out, quantized: how units become decode's
    staging: Staging
    prompt: PromptFigures
    write_times: tuple[WriteTime, ...]
    compute_ms: float | None  # what prefill computes the prompt in. None if unknown
    rates: RateFigures | None
    notes: tuple[str, ...]  # what the figures leave out
