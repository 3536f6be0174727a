# SPDX-License-Identifier: Apache-2.0
"""Decode's int8 caches (C8, FAKQuant) hold the bytes that vllm-ascend's own functions make of prefill's KV.

Which layers are quantized, and their scales, are found in vllm-ascend's own objects. Layer 1 is not quantized.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.int8 import FAKQUANT, Int8Model
from harness.int8_ascend import AscendDecodeRank, AscendPrefillRank
from harness.kv import Side
from harness.pool import long
from harness.ranks import MakePair, Pair, expect_delivery, expect_failure, prompts, run

pytestmark = pytest.mark.npu

BLOCK = 128
C8 = Int8Model(heads=4, widths=(128, 128))
MLA = Int8Model(widths=(512, 64), replicated=True, packings=FAKQUANT)


def side(tp: int) -> Side:
    return Side(tp, num_blocks=24, block_size=BLOCK)


SHAPES = {
    f"{name}-tp{p}-to-tp{d}": (model, side(p), side(d))
    for name, model in (("c8", C8), ("fakquant", MLA))
    for p, d in [(1, 1), (2, 1), (4, 1), (1, 2)]
}
LONG = ("c8-tp4-to-tp1", "fakquant-tp4-to-tp1", "fakquant-tp1-to-tp2")
PROGRAMS = (AscendPrefillRank, AscendDecodeRank)


DELAY = ("CANN_ON_HOST_DELAY_US", "500")


def test_other_scales_are_refused(monkeypatch: pytest.MonkeyPatch, make_pair: MakePair) -> None:
    monkeypatch.setenv(*DELAY)  # as below, so that the ranks there run in the same processes
    pair = make_pair(C8, side(1), side(1), p_model=replace(C8, salt=1), device="npu", programs=PROGRAMS)
    run(pair, prompts(pair, [40]))
    expect_failure(pair, "prefill and decode have other scales for KV in int8")


@pytest.fixture(scope="module", params=[long(shape) if shape in LONG else shape for shape in SHAPES])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*DELAY)
        made = Pair(*SHAPES[request.param], device="npu", programs=PROGRAMS)
        yield made
        assert made.close() == []


@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (200, 0), (None, 128)], ids=["whole", "chunked", "cached"])
def test_bytes_arrive(pair: Pair, chunk: int | None, cached: int) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [1, 127, 128, 129, 300], cached)
    run(pair, requests, chunk)
    expect_delivery(pair, requests)
