# SPDX-License-Identifier: Apache-2.0
"""Decode keeps KV in int8, in NZ order, and prefill quantizes what it sends: bytes on decode equal the right ones.

Layer 1 is not quantized. `tests/npu/test_push_int8.py` compares with vllm-ascend's own functions.
"""

from dataclasses import replace

import pytest
import torch

from harness.kv import C8, FAKQUANT, Model, Prompt, Side
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, Pair, deliver, expect_delivery, expect_failure, pair_of_each, prompts, run
from vllm_ascend_pd.core.step import Send

SHAPES = {
    "C8_TP1_TO_TP1": (C8, Side(1), Side(1)),
    "C8_TP2_TO_TP2": (C8, Side(2), Side(2)),
    "C8_TP2_TO_TP1": (C8, Side(2), Side(1)),
    "C8_TP4_TO_TP1": (C8, Side(4), Side(1)),
    "C8_TP1_TO_TP2": (C8, Side(1), Side(2)),
    "C8_K_AND_V_DIFFER_TP2_TO_TP1": (replace(C8, widths=(64, 32)), Side(2), Side(1)),
    "C8_REPLICAS_TP4_TO_TP1": (replace(C8, heads=2), Side(4), Side(1)),
    "C8_TP3_TO_TP2": (replace(C8, heads=6), Side(3), Side(2)),
    "C8_PP2_TP1_TO_TP2": (C8, Side(1, stages=(1, 2)), Side(2)),
    "C8_IN_TURN_TP2_TO_TP1": (replace(C8, layers=6, plain=(1, 3, 5)), Side(2, buffers=2), Side(1)),
    "FAKQUANT_TP1_TO_TP1": (FAKQUANT, Side(1), Side(1)),
    "FAKQUANT_TP2_TO_TP1": (FAKQUANT, Side(2), Side(1)),
    "FAKQUANT_TP4_TO_TP1": (FAKQUANT, Side(4), Side(1)),
    "FAKQUANT_TP1_TO_TP2": (FAKQUANT, Side(1), Side(2)),
}


# For each of these the short form has one of the same kind.
LONG = ("C8_TP2_TO_TP2", "C8_TP4_TO_TP1", "C8_PP2_TP1_TO_TP2", "FAKQUANT_TP4_TO_TP1")

pair = pair_of_each(SHAPES, long_ones=LONG)


@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (40, 0), (None, 32)], ids=["whole", "chunked", "cached"])
def test_bytes_arrive(pair: Pair, chunk: int | None, cached: int) -> None:
    deliver(pair, chunk, cached)


def compute_from(rank: PrefillRank, start: int) -> None:
    """Computes no tokens before `start` from now on."""
    compute = type(rank)._values

    def computed(layer: int, prompt: Prompt, send: Send) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return compute(
            rank, layer, prompt, Send(send.request_id, max(start, send.start), send.stop, send.blocks, send.last)
        )

    rank._values = computed


@pytest.mark.parametrize("cached", [0, 32])
def test_prefixes_that_prefill_has(pair: Pair, cached: int) -> None:
    """With 32, both engines have one: prefill a longer one."""
    if pair.prefill.buffers:
        pytest.skip("layers that use a buffer in turn keep no prefix")
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [64, 100], cached)
    by_id = {prompt.request_id: prompt for prompt in requests}
    sends = [Send(p.request_id, 0, 48, (p.p_blocks,), last=False) for p in requests]
    pair.each(pair.p_ranks, "compute_unsent", sends, by_id)
    pair.each(pair.p_ranks, "do", compute_from, 48)
    run(pair, requests)
    pair.each(pair.p_ranks, "do", compute_from, 0)
    expect_delivery(pair, requests)


@pytest.mark.parametrize(
    ("p_model", "p_block", "reason"),
    [
        (replace(C8, salt=1), 16, "prefill and decode have other scales for KV in int8"),
        (replace(C8, plain=()), 16, "packing is int8_nz on prefill, none on decode"),
        (C8, 32, "so both sides need the same block size"),
    ],
    ids=["other-scales", "other-layers", "other-blocks"],
)
def test_what_does_not_fit_is_refused(p_model: Model, p_block: int, reason: str, make_pair: MakePair) -> None:
    pair = make_pair(C8, Side(1, block_size=p_block), Side(1), p_model=p_model)
    run(pair, prompts(pair, [40]))
    expect_failure(pair, reason)
