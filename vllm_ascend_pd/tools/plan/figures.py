# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd plan` finds out; `--json` prints it as it stands here. Sizes are bytes, times milliseconds."""

from typing import NamedTuple

import msgspec


class RankPosition(NamedTuple):
    """A rank within its engine."""

    pp_rank: int
    tp_rank: int


class ModelFigures(msgspec.Struct, frozen=True):
    """`widths`: elements that one head of one token takes in each of a layer's tensors."""

    name: str
    layers: int
    cached_layers: int
    kv_heads: int
    mla: bool
    dtype: str
    widths: tuple[int, ...]
    bytes_per_token: int
    bytes_per_token_and_layer: int


class Stage(msgspec.Struct, frozen=True):
    """Layers `[first, stop)`, of which `cached` have a KV cache."""

    first: int
    stop: int
    cached: int


class EngineFigures(msgspec.Struct, frozen=True):
    """`bytes_per_token`: what a token takes on each rank of each stage."""

    tp: int
    pp: int
    dp: int
    block_size: int
    stages: tuple[Stage, ...]
    bytes_per_token: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True):
    """Of every unit of tensor `tensor` of a layer, `per_unit` runs of `nbytes` go to decode's rank `to`."""

    tensor: int
    to: int
    per_unit: int
    nbytes: int


class SenderFigures(msgspec.Struct, frozen=True):
    """A prefill rank, in every stage. It holds heads `[first_head, stop_head)`, as `lanes` ranks do: it serves every
    request whose ticket falls on its `lane`. `exchanges_with`: the ranks of its all-to-all, itself included."""

    tp_rank: int
    first_head: int
    stop_head: int
    lane: int
    lanes: int
    regroup: str
    exchanges_with: tuple[int, ...]
    pieces: tuple[Piece, ...]


class ReaderFigures(msgspec.Struct, frozen=True):
    """A decode rank, in every stage. `writers`: per lane of prefill's, the ranks of each stage that write to it."""

    tp_rank: int
    first_head: int
    stop_head: int
    writers: tuple[tuple[int, ...], ...]


class Staging(msgspec.Struct, frozen=True):
    """Memory that every prefill rank sets aside for regrouping: `slots` slots of `slot_bytes`, which hold a layer of
    a step of `step_tokens`, and two buffers of a slot's size for the all-to-all. All 0 if nothing can need it.
    Not in `total_bytes`: `communicator_bytes`, which HCCL takes on an NPU for the `groups` that a rank belongs to."""

    step_tokens: int
    slots: int
    slot_bytes: int
    total_bytes: int
    groups: int
    communicator_bytes: int


class Flow(msgspec.Struct, frozen=True):
    """What one rank writes to another for a prompt on `lane`: `layers` layers, from `first_layer` to `last_layer`.
    Descriptors: with no two of the prompt's blocks next to each other, and with all of them so."""

    source: RankPosition
    target: RankPosition
    lane: int
    first_layer: int
    last_layer: int
    layers: int
    nbytes: int
    descriptors: int
    descriptors_contiguous: int


class PromptFigures(msgspec.Struct, frozen=True):
    """A prompt of `tokens` tokens, which travels as `units` whole units. `nbytes` and `descriptors` are those of all
    ranks together; `busiest_sender` and `busiest_reader` what passes one rank's link at most."""

    tokens: int
    units: int
    flows: tuple[Flow, ...]
    nbytes: int
    busiest_sender: int
    busiest_reader: int
    descriptors: int
    descriptors_contiguous: int


class Timing(msgspec.Struct, frozen=True):
    """For the prompt, over links of `link_gbit` per rank and direction.

    transfer_ms: on the busiest link, if nothing else uses it. layer_ms: the same for one layer.
    prefill_link_ms, decode_link_ms: in the time in which every prefill engine computes one such prompt, how long a
    rank's link is busy; prompts spread over lanes and over data-parallel engines.
    compute_ms: how long prefill computes the prompt. after_prefill_ms: from then until decode has everything, if all
    layers take equally long to compute. Both are none where the caller does not know.
    """

    link_gbit: float
    transfer_ms: float
    layer_ms: float
    prefill_link_ms: float
    decode_link_ms: float
    compute_ms: float | None
    after_prefill_ms: float | None


class PlanFigures(msgspec.Struct, frozen=True):
    """`unit_tokens`: the smaller of the two sides' blocks. `all_to_all`: groups of prefill's ranks that exchange heads
    for this decode engine; `groups_created`: how many prefill creates at its start, for any decode engine."""

    model: ModelFigures
    layout: str
    prefill: EngineFigures
    decode: EngineFigures
    unit_tokens: int
    senders: tuple[SenderFigures, ...]
    readers: tuple[ReaderFigures, ...]
    all_to_all: tuple[tuple[int, ...], ...]
    groups_created: int
    staging: Staging
    prompt: PromptFigures
    timing: Timing | None
    notes: tuple[str, ...]
