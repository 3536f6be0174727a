# SPDX-License-Identifier: Apache-2.0
"""`verify_kv` finds KV that is not what prefill computed, blames the right place, and never blames right KV."""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.int8 import Int8DecodeRank, Int8Model, Int8PrefillRank
from harness.kv import Prompt, Side, layer_name
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair, expect_delivery, prompts, run
from test_push import SHAPES
from test_push_int8 import C8, MLA
from vllm_ascend_pd.core.kv_dump import pattern, read_dump
from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.step import DecodeStep
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.decode import checksums
from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import Flight

ALL = {"verify_kv": "all"}


def count_verified(rank: DecodeRank) -> None:
    """Counts the prefill ranks whose checksums are compared from now on."""
    rank.compared = []
    missing = checksums.Tally.missing

    def counted(tally: checksums.Tally, reported: bytes) -> object:
        rank.compared.append(len(reported))
        return missing(tally, reported)

    checksums.Tally.missing = counted


def verified(rank: DecodeRank) -> int:
    return len(rank.compared)


# Each way that KV takes and each sharing of it. `test_push.py` has the other shapes.
VERIFIED = {
    name: SHAPES[name]
    for name in (
        "GQA_TP4_TO_TP2",
        "GQA_TP1_TO_TP2",
        "GQA_TP2_TO_TP2",
        "HEAD_MAJOR_TP2_TO_TP1",
        "HEAD_MAJOR_TP1_TO_TP2",
        "BLOCK_32_TO_16_TP2_TO_TP1",
        "BLOCK_128_TO_64_TP1_TO_TP2",
        "PP2_TP2_TO_PP2_TP1_WITH_OTHER_LAYERS",
        "REPLICAS_TP4_TO_TP1",
        "TP3_TO_TP2",
        "TP2_TO_TP3",
        "MLA_DCP2_TO_TP1",
        "MLA_TP1_TO_DCP2",
        "MLA_PCP2_DCP2_TO_DCP2",
        "REPLICAS_DCP2_TO_DCP2",
        "SPLIT_PCP2_TO_DCP2",
        "GATHERED_PP2_PCP2_TP2_TO_TP1",
        "SPARSE_C8_TP2_TO_TP1",
        "SPARSE_C8_DCP2_TO_DCP2",
    )
} | {  # quantized on the way: prefill takes the checksums of what it sends
    "C8_TP2_TO_TP1": (replace(C8, plain=(0,)), Side(2), Side(1)),
    "C8_TP1_TO_TP2": (replace(C8, plain=(0,)), Side(1), Side(2)),
    "FAKQUANT_TP2_TO_TP1": (replace(MLA, plain=(0,)), Side(2), Side(1)),
}


@pytest.fixture(scope="module", params=VERIFIED.values(), ids=VERIFIED.keys())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    is_int8 = isinstance(request.param[0], Int8Model)
    programs = (Int8PrefillRank, Int8DecodeRank) if is_int8 else (PrefillRank, DecodeRank)
    folder = tmp_path_factory.mktemp("dumps")
    made = Pair(*request.param, config=ALL | {"trace_dir": str(folder)}, programs=programs)
    made.each(made.d_ranks, "do", count_verified)
    yield made
    assert made.close() == []


@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (40, 0), (None, 32)], ids=["whole", "chunked", "cached"])
def test_right_kv_is_never_blamed(pair: Pair, chunk: int | None, cached: int) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [1, 15, 16, 17, 64, 100], cached)
    before = pair.each(pair.d_ranks, "do", verified)
    run(pair, requests, chunk)
    expect_delivery(pair, requests)
    after = pair.each(pair.d_ranks, "do", verified)
    many = sum(prompt.num_tokens > prompt.cached + 16 for prompt in requests)
    assert all(now - then >= many for now, then in zip(after, before, strict=True)), "nothing was compared"


# Faults, made in the first block of the second of three requests, in layer 1 (counted from 0).

LAYER, VICTIM, OTHER = 1, 1, 2


def first_bytes(rank: DecodeRank, victim: Prompt) -> torch.Tensor | None:
    """Returns the victim's first block on this rank as its bytes, of layer 1's first part. None: it is elsewhere."""
    if layer_name(LAYER) not in rank.caches or 0 not in rank.side.places(rank.rank, 0, rank.side.span):
        return None
    return rank.caches[layer_name(LAYER)][0][victim.d_blocks[0]]


def spoil(rank: DecodeRank, fault: str, victim: Prompt, other: Prompt) -> None:
    """Spoils the victim's first block, when its KV has arrived and is not compared yet."""
    begin = rank.worker._verifier.begin
    first_bytes(rank, victim).copy_(torch.full_like(first_bytes(rank, victim), 3))  # old content

    def begin_spoiled(delivered: list[checksums.Delivered]) -> None:
        if any(each.expect.request_id == victim.request_id for each in delivered):
            block = first_bytes(rank, victim)
            view = block if rank.model.order is Order.TOKEN_MAJOR else block.transpose(0, 1)  # [tokens, heads, width]
            match fault:
                case "bit":
                    block.view(torch.uint8).view(-1)[0] ^= 16
                case "zeros":
                    block.zero_()
                case "old content":
                    block.fill_(3)
                case "another request":
                    block.copy_(first_bytes(rank, other))
                case "heads":
                    view[:, [0, 1]] = view[:, [1, 0]].clone()
        begin(delivered)

    rank.worker._verifier.begin = begin_spoiled


def mend(rank: DecodeRank) -> None:
    rank.worker._verifier.__dict__.pop("begin", None)


def writers_of(pair: Pair, d_rank: int, whole: bool) -> set[tuple[int, int]]:
    """Returns (stage, rank) of the prefill ranks that may be blamed for the first block of a decode rank in layer 1:
    for its first token and head, or for all of it (`whole`)."""
    prefill, decode, model = pair.prefill, pair.decode, pair.model
    theirs = sharding(prefill.tp, prefill.dcp, prefill.interleave, prefill.pcp)
    total = 1 if model.replicated else model.heads
    places = decode.places(d_rank, 0, decode.span)[0]
    tokens = [token for token, place in places if whole or place == 0]
    heads = model.heads_of(d_rank % decode.tp, decode.tp)
    stage = next(s for s in range(prefill.pp) if LAYER in prefill.layers_of(s, model))
    return {
        (stage, rank)
        for token in tokens
        for head in (heads if whole else heads[:1])
        for rank in theirs.holders(head, total, token // theirs.share(0).interleave % theirs.parts)
    }


def expect_blame(pair: Pair, requests: list[Prompt], d_ranks: list[int], whole: bool) -> None:
    """Checks that the victim alone fails, and that each of these decode ranks names the place and who computed it."""
    victim = requests[VICTIM]
    pair.each(pair.d_ranks, "do", clear_log)
    run(pair, requests)
    received, failed = pair.wait_arrivals(len(requests))
    assert received == {prompt.request_id for prompt in requests if prompt is not victim}
    assert list(failed) == [victim.request_id]
    assert "KV differs from what prefill computed (verify_kv)" in failed[victim.request_id]
    assert set(pair.wait_sent(len(requests))) <= {victim.request_id}  # revoked where its writing was not over
    for n, texts in enumerate(pair.each(pair.d_ranks, "warnings")):
        found = [text for text in texts if "wrong on arrival" in text]
        assert len(found) == (n in d_ranks), (n, texts)
        for text in found:
            assert f"request {victim.request_id}: " in text
            places = re.findall(r"(\S+) tensor (\d) in blocks ([\d, ]+), from prefill rank (\d+) of stage (\d+)", text)
            assert {(layer, part) for layer, part, *_ in places} == {(layer_name(LAYER), "0")}
            assert all(str(victim.d_blocks[0]) in blocks.split(", ") for _, _, blocks, *_ in places)
            assert all(len(blocks.split(", ")) == 1 for _, _, blocks, *_ in places)
            blamed = {(int(stage), int(rank)) for *_, rank, stage in places}
            assert blamed <= writers_of(pair, n % pair.decode.ranks, whole)
            assert len(blamed) == 1 or whole


def clear_log(rank: DecodeRank) -> None:
    rank._warnings.messages.clear()


def holds_first(rank: DecodeRank, victim: Prompt) -> bool:
    return first_bytes(rank, victim) is not None


def dumps(rank: DecodeRank) -> str:
    """Empties the folder of dumps, and returns it."""
    for file in Path(rank.parsed.trace_dir).glob("*.npz"):
        file.unlink()
    return rank.parsed.trace_dir


PATTERNS = {
    "bit": "one bit: bit ",
    "zeros": "zeros",
    "old content": "one value everywhere",
    "another request": "the KV of blocks ",
    "heads": "heads 0 and 1 exchanged",
}


@pytest.mark.parametrize("fault", PATTERNS)
def test_wrong_kv_is_found_and_blamed(pair: Pair, fault: str) -> None:
    requests = prompts(pair, [40, 70, 60])
    victim, other = requests[VICTIM], requests[OTHER]
    holders = [n for n, has in enumerate(pair.each(pair.d_ranks, "do", holds_first, victim)) if has]
    assert holders
    if fault == "heads" and len(pair.model.heads_of(0, pair.decode.tp)) < 2:
        fault = "zeros"  # a rank has one head
    folder = Path(pair.d_ranks[0].call("do", dumps))
    pair.d_ranks[holders[-1]].call("do", spoil, fault, victim, other)
    try:
        expect_blame(pair, requests, holders[-1:], whole=fault != "bit")
    finally:
        pair.each(pair.d_ranks, "do", mend)
    dump = read_dump(folder / "verify-0.npz")
    assert (folder / "verify-0.npz").stat().st_mode & 0o777 == 0o600
    assert dump.text.startswith(f"request {victim.request_id}: {layer_name(LAYER)} tensor 0 in blocks ")
    found, _ = pattern(dump)
    is_int8 = isinstance(pair.model, Int8Model)  # there, rows of several heads are exchanged
    assert found.startswith("the whole block" if is_int8 and fault == "heads" else PATTERNS[fault]), (fault, found)


def flip_on_the_way(rank: PrefillRank, ranges: list[tuple[str, int, int]]) -> None:
    """Flips a bit of what is about to be written into one of decode's ranges: in the staging slot or in the cache."""
    begin = TransferEngine.begin

    def begin_flipped(session: str, batch: Batch, *others: Any) -> Flight | None:
        for source, target, size in zip(*batch, strict=True):
            for theirs, start, length in ranges:
                if theirs == session and target <= start < target + size and length:
                    ctypes.c_uint8.from_address(source + start - target).value ^= 4
        return begin(rank.engine, session, batch, *others)

    rank.engine.begin = begin_flipped


def stop_flipping(rank: PrefillRank) -> None:
    rank.engine.__dict__.pop("begin", None)


def test_a_bit_that_flips_after_prefill_computed_it_is_found_and_blamed(pair: Pair) -> None:
    requests = prompts(pair, [40, 70, 60])
    victim = requests[VICTIM]
    holders = [n for n, has in enumerate(pair.each(pair.d_ranks, "do", holds_first, victim)) if has]
    session = pair.descriptions[holders[0]].session
    [place] = [each for each in pair.addresses(LAYER, victim.d_blocks[:1]) if each[0] == session][:1]
    pair.each(pair.p_ranks, "do", flip_on_the_way, [place])
    try:
        expect_blame(pair, requests, holders[:1], whole=False)
    finally:
        pair.each(pair.p_ranks, "do", stop_flipping)


def lose_layer(rank: PrefillRank, ranges: list[tuple[str, int, int]]) -> None:
    """Makes the writes into decode's ranges succeed without writing anything."""
    begin = TransferEngine.begin

    def begin_some(session: str, batch: Batch, *others: Any) -> Flight | None:
        kept = [
            copy
            for copy in zip(*batch, strict=True)
            if not any(
                s == session and copy[1] < start + size and start < copy[1] + copy[2] for s, start, size in ranges
            )
        ]
        sources, targets, sizes = ([copy[i] for copy in kept] for i in range(3))
        return begin(rank.engine, session, (sources, targets, sizes), *others) if kept else None

    rank.engine.begin = begin_some


def test_a_write_that_never_arrives_is_found(pair: Pair) -> None:
    requests = prompts(pair, [40, 70, 60])
    victim = requests[VICTIM]
    pair.each(pair.d_ranks, "clear")
    holders = [n for n, has in enumerate(pair.each(pair.d_ranks, "do", holds_first, victim)) if has]
    session = pair.descriptions[holders[0]].session
    [place] = [each for each in pair.addresses(LAYER, victim.d_blocks[:1]) if each[0] == session][:1]
    pair.each(pair.p_ranks, "do", lose_layer, [place])
    try:
        run(pair, requests)
        _, failed = pair.wait_arrivals(len(requests))
        assert victim.request_id in failed
        assert f"{layer_name(LAYER)} tensor 0" in failed[victim.request_id]
        assert set(pair.wait_sent(len(requests))) <= {victim.request_id}  # revoked where its writing was not over
    finally:
        pair.each(pair.p_ranks, "do", stop_flipping)


def overwritten(rank: DecodeRank, ticket_ids: list[str]) -> dict[str, tuple[str, list[int]]]:
    """Begins the tickets' first step. Returns what the rank reports of it."""
    rank.worker.take_report()
    rank.worker.start_step(DecodeStep(begun=ticket_ids))
    report = rank.worker.take_report()
    assert (report.verified if report else {}) == ({"overwritten": len(report.overwritten)} if report else {})
    return report.overwritten if report else {}


def overwrite(rank: DecodeRank, victim: Prompt) -> None:
    first_bytes(rank, victim).view(torch.uint8).view(-1)[5] ^= 1


def test_a_block_that_is_overwritten_after_arrival_is_found_and_blamed(pair: Pair) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [40, 70, 60])
    victim = requests[VICTIM]
    run(pair, requests)
    expect_delivery(pair, requests)
    pair.each(pair.d_ranks, "do", clear_log)
    holders = [n for n, has in enumerate(pair.each(pair.d_ranks, "do", holds_first, victim)) if has]
    pair.d_ranks[holders[-1]].call("do", overwrite, victim)
    begun = list(pair._request_of)[-len(requests) :]
    for n, found in enumerate(pair.each(pair.d_ranks, "do", overwritten, begun)):
        assert list(found) == ([victim.request_id] if n == holders[-1] else []), found
        for reason, blocks in found.values():
            assert reason.startswith("overwritten later: right on arrival ")
            assert victim.d_blocks[0] in blocks
            [place] = re.findall(r"(\S+) tensor 0 in blocks (\d+), from prefill rank (\d+) of stage (\d+)", reason)
            assert place[:2] == (layer_name(LAYER), str(victim.d_blocks[0]))
            assert (int(place[3]), int(place[2])) in writers_of(pair, n % pair.decode.ranks, whole=True)
    assert not any(pair.each(pair.d_ranks, "do", overwritten, begun)), "each is compared again once"
