# SPDX-License-Identifier: Apache-2.0
"""The workers on torch_npu tensors in vllm-ascend's shapes: HCCL groups, a real Mooncake engine, real processes.

Emulated, the kernels that CANN would compile are those of tests/ascendc_twin; by default there are torch_npu's
operators.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cann_on_host
from harness.kv import GQA, INT8, LINEAR, SIX_HEADS, Model, Side
from harness.pool import long
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import MakePair, Pair, expect_delivery, prompts, run
from vllm_ascend_pd.device import ops, ops_fallback

pytestmark = pytest.mark.npu

MLA = Model(widths=(512, 64), replicated=True)
BLOCK = 128  # vllm-ascend's only block size with P/D


def side(tp: int) -> Side:
    return Side(tp, num_blocks=24, block_size=BLOCK)


SHAPES = {f"tp{p}-to-tp{d}": (GQA, side(p), side(d)) for p, d in [(1, 1), (2, 1), (4, 2), (1, 2)]} | {
    "mla-tp2-to-tp1": (MLA, side(2), side(1)),
    "mla-tp1-to-tp1": (MLA, side(1), side(1)),
    "int8-tp2-to-tp1": (INT8, side(2), side(1)),
    "tp3-to-tp2": (SIX_HEADS, side(3), side(2)),  # heads are exchanged and divided
}
# Prefill keeps the KV of 4 layers: 12 layers use these buffers in turn, as vllm-ascend 0.30 lets them.
SHAPES |= {
    f"in-turn-tp{p}-to-tp{d}": (Model(layers=12), replace(side(p), buffers=4), side(d)) for p, d in [(1, 1), (2, 1)]
}
LENGTHS = [1, 127, 128, 129, 300]

EVERY_STREAM = ("CANN_ON_HOST_DELAY_US", "500")
SIDE_STREAMS = ("CANN_ON_HOST_DELAY_SIDE_US", "20000")
# A late side stream matters where there is work on it: one shape of each kind.
CASES = [(shape, EVERY_STREAM) for shape in SHAPES] + [
    (shape, SIDE_STREAMS) for shape in ("tp2-to-tp1", "tp1-to-tp2", "mla-tp2-to-tp1", "in-turn-tp2-to-tp1")
]


# By shape, the kernel that regroups it.
WITH_KERNELS = {
    "tp2-to-tp1": "vllm_ascend_pd_interleave",
    "tp4-to-tp2": "vllm_ascend_pd_interleave",
    "tp1-to-tp2": "vllm_ascend_pd_split",
    "int8-tp2-to-tp1": "vllm_ascend_pd_interleave",
    "tp3-to-tp2": "vllm_ascend_pd_split",
}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1][0].lower()}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    shape, (delay, microseconds) = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(delay, microseconds)
        made = Pair(*SHAPES[shape], device="npu")
        yield made
        assert made.close() == []


def push(pair: Pair) -> None:
    """Two steps at least for the longest prompt: what the first one's pushes read is not what the second computes."""
    requests = prompts(pair, LENGTHS)
    run(pair, requests, chunk=200)
    expect_delivery(pair, requests)


def test_bytes_arrive(pair: Pair) -> None:
    push(pair)


def results(rank: DecodeRank) -> set[str]:
    """Returns what comparisons with prefill's checksums have found."""
    return set(rank.verified)


def test_states_arrive_beside_attentions_caches(monkeypatch: pytest.MonkeyPatch, make_pair: MakePair) -> None:
    """Other states, sizes and context parallelism: tests/integration/test_push_states.py."""
    monkeypatch.setenv(*EVERY_STREAM)
    monkeypatch.delenv(SIDE_STREAMS[0], raising=False)  # the last `pair` may still be there
    pair = make_pair(LINEAR, side(1), side(2), {"verify_kv": "all"}, device="npu")
    push(pair)
    said = [pair.each(ranks, "warnings") for ranks in (pair.p_ranks, pair.d_ranks)]
    assert pair.each(pair.d_ranks, "do", results) == [{"right"}] * 2, said


def wake(rank: PrefillRank | DecodeRank) -> None:
    rank.worker.wake()


def sleep(rank: PrefillRank | DecodeRank) -> None:
    rank.worker.sleep()


def test_ranks_that_have_slept_send_and_receive_again(make_pair: MakePair) -> None:
    """Mooncake's engines stop, and start again with the same memory."""
    pair = make_pair(GQA, side(2), side(1), device="npu")
    push(pair)
    for ranks in (pair.d_ranks, pair.p_ranks):
        pair.each(ranks, "do", sleep)
        pair.each(ranks, "do", wake)
        pair.listener.close(5.0)
        pair._listen(f"{pair.decode_id}.1", pair.port)
        pair.each(pair.d_ranks, "clear")
        push(pair)


def test_a_layer_of_more_chunks_than_staging_slots_arrives(make_pair: MakePair) -> None:
    """On an NPU the model's thread itself waits for a slot, which only the sending of an earlier chunk frees."""
    sides = (Side(tp, num_blocks=48, block_size=BLOCK) for tp in (2, 1))
    pair = make_pair(GQA, *sides, {"staging_slots": 1, "write_timeout_s": 5.0, "grant_timeout_s": 5.0}, device="npu")
    requests = prompts(pair, [18 * BLOCK])
    run(pair, requests, chunk=18 * BLOCK)
    expect_delivery(pair, requests)


def reduce_every_layer(rank: PrefillRank) -> None:
    """From now on a layer's computation ends with a collective among all ranks, as a tensor-parallel model's does."""
    compute, hidden = rank.compute, torch.zeros(64, device="npu")

    def computed(layer: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        compute(layer, copies)
        torch.distributed.all_reduce(hidden)

    torch.distributed.all_reduce(hidden)  # connects
    rank.compute = computed  # type: ignore[method-assign]


@pytest.mark.parametrize("chip", ["Ascend910B1", long("Ascend910_9391")])
@pytest.mark.parametrize("shape", ["tp2-to-tp1", long("tp4-to-tp2")])
def test_bytes_arrive_beside_the_models_collectives(
    shape: str, chip: str, monkeypatch: pytest.MonkeyPatch, make_pair: MakePair
) -> None:
    """An engine may start the model's communicators in mode AIV, which HCCL allows one of at a time."""
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    if cann_on_host.is_active():
        monkeypatch.setenv("CANN_ON_HOST_SOC", chip)
        monkeypatch.setenv(*SIDE_STREAMS)
    pair = make_pair(*SHAPES[shape], device="npu")
    pair.each(pair.p_ranks, "do", reduce_every_layer)
    push(pair)


def warnings_of_missing_kernels(_: PrefillRank) -> int:
    return ops_fallback.warn_once.cache_info().misses


@pytest.mark.skipif(not ops.npu_kernels.reason, reason="the kernels are in use")
@pytest.mark.parametrize(("shape", "times"), [("tp2-to-tp1", 1), ("mla-tp1-to-tp1", 0)])
def test_prefill_that_may_regroup_says_once_at_its_start_that_it_has_no_kernels(
    shape: str, times: int, make_pair: MakePair
) -> None:
    pair = make_pair(*SHAPES[shape], device="npu")
    assert set(pair.each(pair.p_ranks, "do", warnings_of_missing_kernels)) == {times}
    if times:
        push(pair)
        assert set(pair.each(pair.p_ranks, "do", warnings_of_missing_kernels)) == {times}


def launched(_: PrefillRank) -> dict[str, int]:
    return cann_on_host.launches()


@pytest.mark.emulated
@pytest.mark.parametrize("shape", ["tp2-to-tp1", long("mla-tp2-to-tp1"), long("int8-tp2-to-tp1")])
def test_checksums_take_one_launch_for_a_layer_whatever_the_number_of_requests(
    kernels: Path, shape: str, make_pair: MakePair
) -> None:
    """And verify what arrives: decode's ranks fail requests that differ."""
    pair = make_pair(*SHAPES[shape], {"verify_kv": "all"}, device="npu", kernels=kernels)
    for count in (1, 4):
        before = pair.each(pair.p_ranks, "do", launched)
        requests = prompts(pair, [BLOCK] * count)
        run(pair, requests, chunk=count * BLOCK)
        expect_delivery(pair, requests)
        after = pair.each(pair.p_ranks, "do", launched)
        kernel = "vllm_ascend_pd_sum"
        taken = {now.get(kernel, 0) - then.get(kernel, 0) for then, now in zip(before, after, strict=True)}
        layers = SHAPES[shape][0].layers
        assert layers in taken
        assert taken <= {0, layers}  # of replicated heads one rank sends each


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [long(each) if each == "tp4-to-tp2" else each for each in WITH_KERNELS])
def test_bytes_arrive_through_compiled_kernels(
    kernels: Path, shape: str, monkeypatch: pytest.MonkeyPatch, make_pair: MakePair
) -> None:
    monkeypatch.setenv(*EVERY_STREAM)
    pair = make_pair(*SHAPES[shape], device="npu", kernels=kernels)
    before = pair.each(pair.p_ranks, "do", launched)
    push(pair)
    kernel = WITH_KERNELS[shape]
    for then, now in zip(before, pair.each(pair.p_ranks, "do", launched), strict=True):
        assert now[kernel] > then.get(kernel, 0)
        assert now.get("aclnnIndexSelect", 0) == then.get("aclnnIndexSelect", 0), "torch_npu's operators regroup"
