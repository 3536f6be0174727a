# SPDX-License-Identifier: Apache-2.0
"""The workers on torch_npu tensors in vllm-ascend's shapes: HCCL groups, a real Mooncake engine, real processes.

Memory of an emulated NPU is host memory, so Mooncake moves it over TCP; on hardware its own protocol does.
"""

from collections.abc import Iterator

import pytest
import torch

from harness.kv import Model, Side
from harness.ranks import Pair, prompts, run

pytestmark = pytest.mark.npu

GQA = Model(heads=4, widths=(32, 32))
MLA = Model(widths=(512, 64), replicated=True)

BLOCK = 128  # vllm-ascend's only block size with P/D


def side(tp: int) -> Side:
    return Side(tp, num_blocks=24, block_size=BLOCK)


SHAPES = {f"tp{p}-to-tp{d}": (GQA, side(p), side(d)) for p, d in [(1, 1), (2, 1), (4, 2), (4, 1), (1, 2), (2, 4)]} | {
    "mla-tp2-to-tp1": (MLA, side(2), side(1)),
    "mla-tp1-to-tp1": (MLA, side(1), side(1)),
    "float16-tp2-to-tp1": (Model(dtype=torch.float16), side(2), side(1)),
    "int8-tp2-to-tp1": (Model(dtype=torch.int8), side(2), side(1)),
}
LENGTHS = [1, 127, 128, 129, 300]

DELAYS = {
    "no-delay": {},
    "every-stream-delayed": {"CANN_ON_HOST_DELAY_US": "500"},
    "side-streams-delayed": {"CANN_ON_HOST_DELAY_SIDE_US": "20000"},
}


@pytest.fixture(scope="module", params=DELAYS.values(), ids=DELAYS.keys())
def delay(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in request.param.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def pair(request: pytest.FixtureRequest, delay: None) -> Iterator[Pair]:
    made = Pair(*request.param, device="npu")
    yield made
    assert made.close() == []


@pytest.mark.parametrize("chunk", [None, 200], ids=["whole", "chunked"])
def test_bytes_arrive(pair: Pair, chunk: int | None) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, LENGTHS)
    run(pair, requests, chunk)
    received, failed = pair.wait_arrivals(len(requests))
    assert failed == {}
    assert received == {prompt.request_id for prompt in requests}
    assert pair.differences(requests) == []
    assert pair.wait_sent(len(requests)) == {}


# Not `pair`: these break the ranks they run on.
@pytest.mark.parametrize(
    ("where", "shape", "delayed"),
    [
        ("for-compute", "tp1-to-tp1", "CANN_ON_HOST_DELAY_US"),
        ("for-compute", "tp2-to-tp1", "CANN_ON_HOST_DELAY_US"),
        ("for-regroup", "tp2-to-tp1", "CANN_ON_HOST_DELAY_SIDE_US"),
    ],
    ids=["compute-direct", "compute-regrouped", "regroup"],
)
def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch, where: str, shape: str, delayed: str) -> None:
    monkeypatch.setenv(delayed, "20000")
    pair = Pair(*SHAPES[shape], device="npu")
    try:
        for rank in pair.p_ranks:
            rank.call("forget_to_wait", where)
            rank.spoil()
        requests = prompts(pair, LENGTHS)
        run(pair, requests)
        pair.wait_arrivals(len(requests))
        assert pair.differences(requests) != []
        pair.wait_sent(len(requests))
    finally:
        pair.close()
