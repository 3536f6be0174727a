# SPDX-License-Identifier: Apache-2.0
"""`verify_kv` finds KV that is not what prefill computed, blames the right place, and never blames right KV."""

import ctypes
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.kv import C8, FAKQUANT, Prompt, Side, layer_name
from harness.pool import long
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair, expect_delivery, prompts, run
from test_push import SHAPES
from vllm_ascend_pd.core.checksum import Form, is_selected
from vllm_ascend_pd.core.kv_dump import pattern, read_dump
from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.prefill_ticket import Phase
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, Send
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.decode import checksums
from vllm_ascend_pd.device.event import DeviceError, Event
from vllm_ascend_pd.prefill import checksums as checksums_of_prefill
from vllm_ascend_pd.prefill import control
from vllm_ascend_pd.prefill import worker as prefill_worker
from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import Flight

ALL = {"verify_kv": "all"}


def count_verified(rank: DecodeRank) -> None:
    """Counts the prefill ranks whose checksums are compared from now on."""
    rank.compared = []
    missing = checksums.Tallies.missing

    def counted(tally: checksums.Tallies, reported: bytes) -> object:
        rank.compared.append(len(reported))
        return missing(tally, reported)

    checksums.Tallies.missing = counted


def take_32_bits(rank: PrefillRank) -> None:
    """As on an NPU whose vector units take sums."""
    object.__setattr__(rank.worker._rank, "checksum_form", Form.SUM_32)


def verified(rank: DecodeRank) -> int:
    return len(rank.compared)


def results(rank: DecodeRank) -> dict[str, int]:
    """Returns the results since the last call."""
    found = dict(rank.verified)
    rank.verified.clear()
    return found


VERIFIED = SHAPES | {  # quantized on the way: prefill takes the checksums of what it sends
    "C8_TP2_TO_TP1": (replace(C8, plain=(0,)), Side(2), Side(1)),
    "C8_TP1_TO_TP2": (replace(C8, plain=(0,)), Side(1), Side(2)),
    "FAKQUANT_TP2_TO_TP1": (replace(FAKQUANT, plain=(0,)), Side(2), Side(1)),
}

# Each way that KV takes and each sharing of it.
SHORT = (
    "GQA_TP4_TO_TP2",
    "GQA_TP1_TO_TP2",
    "GQA_TP2_TO_TP2",
    "HEAD_MAJOR_TP2_TO_TP1",
    "BLOCK_128_TO_64_TP1_TO_TP2",
    "PP2_TP2_TO_PP2_TP1_WITH_OTHER_LAYERS",
    "REPLICAS_TP4_TO_TP1",
    "TP3_TO_TP2",
    "MLA_DCP2_TO_TP1",
    "SPLIT_PCP2_TO_DCP2",
    "SPARSE_C8_DCP2_TO_DCP2",
    "C8_TP2_TO_TP1",
)


# Whose prefill ranks take sums of 32 bits.
BY_32_BITS = ("GQA_TP1_TO_TP2", "HEAD_MAJOR_TP2_TO_TP1", "REPLICAS_TP4_TO_TP1", "MLA_DCP2_TO_TP1", "C8_TP2_TO_TP1")


@pytest.fixture(scope="module", params=[name if name in SHORT else long(name) for name in VERIFIED])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    shape = VERIFIED[request.param]
    folder = tmp_path_factory.mktemp("dumps")
    made = Pair(*shape, config=ALL | {"trace_dir": str(folder)})
    made.each(made.d_ranks, "do", count_verified)
    if request.param in BY_32_BITS:
        made.each(made.p_ranks, "do", take_32_bits)
    yield made
    assert made.close() == []


LENGTHS = [1, 15, 16, 17, 64, 100]


@pytest.mark.parametrize(
    ("lengths", "chunk", "cached"),
    [(LENGTHS, None, 0), (LENGTHS, 40, 0), (LENGTHS, None, 32), ([1], None, 0)],
    ids=["whole", "chunked", "cached", "nothing on most ranks"],
)
def test_right_kv_is_never_blamed(pair: Pair, lengths: list[int], chunk: int | None, cached: int) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, lengths, cached)
    before = pair.each(pair.d_ranks, "do", verified)
    pair.each(pair.d_ranks, "do", results)
    run(pair, requests, chunk)
    expect_delivery(pair, requests)
    assert pair.each(pair.d_ranks, "do", results) == [{"right": len(requests)}] * len(pair.d_ranks)
    after = pair.each(pair.d_ranks, "do", verified)
    many = sum(prompt.num_tokens > prompt.cached + 16 for prompt in requests)
    assert all(now - then >= many for now, then in zip(after, before, strict=True)), "nothing was compared"


def verify_nothing(rank: PrefillRank) -> None:
    control.is_selected = lambda *_: False


def go_on(rank: PrefillRank) -> None:
    """Later steps write into the blocks in which prompts end."""
    start_step = rank.worker.start_step

    def start(step: PrefillStep) -> None:
        start_step(replace(step, sends=[replace(send, grows=send.last) for send in step.sends]))

    rank.worker.start_step = start


def as_before(rank: PrefillRank) -> None:
    control.is_selected = is_selected
    rank.worker.__dict__.pop("start_step", None)


@pytest.mark.parametrize("change", [verify_nothing, go_on])
def test_right_kv_that_cannot_be_compared_is_counted_as_unknown(pair: Pair, change: Any) -> None:
    """Prefill does not verify it, or sends a block that is opaque and may change while it is sent."""
    requests = prompts(pair, [16 * 4, 40])
    is_opaque = any(each.order is Order.HEAD_MAJOR for each in pair.descriptions[0].caches.geometries)
    pair.each(pair.d_ranks, "clear")
    pair.each(pair.d_ranks, "do", results)
    pair.each(pair.p_ranks, "do", change)
    try:
        run(pair, requests)
        expect_delivery(pair, requests)
    finally:
        pair.each(pair.p_ranks, "do", as_before)
    expected = {"unknown": 2}
    if change is go_on:
        expected = {"right": 1, "unknown": 1} if is_opaque else {"right": 2}
    assert pair.each(pair.d_ranks, "do", results) == [expected] * len(pair.d_ranks)


def is_writing(rank: PrefillRank) -> bool:
    return all(transfer.state.phase is Phase.WRITING for transfer in rank.worker._transfers.values())


def test_kv_that_vllm_took_back_is_not_blamed_once_it_was_sent_again(pair: Pair) -> None:
    """Prefill takes the checksums of both. Decode is told when vLLM has ended the request."""
    pair.each(pair.d_ranks, "clear")
    first = math.lcm(pair.prefill.span, pair.decode.span)
    [prompt] = requests = prompts(pair, [first + 40])
    of_right, of_wrong = {prompt.request_id: prompt}, {prompt.request_id: replace(prompt, seed=99)}

    def step(start: int, stop: int, of: dict[str, Prompt], **fields: Any) -> None:
        blocks = prompt.p_blocks[start // pair.prefill.span : -(-stop // pair.prefill.span)]
        last = stop == prompt.num_tokens
        send = Send(prompt.request_id, start, stop, (blocks,), last, confirmed=False, again=start < sent[0])
        sent[0] = max(sent[0], stop)
        pair.each(pair.p_ranks, "step", PrefillStep(sends=[send], **fields), of)

    sent = [0]
    step(0, first, of_right, tickets=pair.announce(requests))
    step(first, prompt.num_tokens, of_wrong)
    assert all(pair.each(pair.p_ranks, "do", is_writing))
    step(first, prompt.num_tokens, of_right)
    pair.each(pair.p_ranks, "step", PrefillStep(finished={prompt.request_id: None}), of_right)
    expect_delivery(pair, requests)


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


def writers_of(pair: Pair, d_rank: int, whole: bool, stop: int = 0) -> set[tuple[int, int]]:
    """Returns (stage, rank) of the prefill ranks that may be blamed for the first tokens of a decode rank in layer 1,
    up to `stop` (0: of its first block): for its first token and head, or for all of it (`whole`)."""
    prefill, decode, model = pair.prefill, pair.decode, pair.model
    theirs = sharding(prefill.tp, prefill.dcp, prefill.interleave, prefill.pcp)
    total = 1 if model.replicated else model.heads
    places = [each for block in decode.places(d_rank, 0, stop or decode.span).values() for each in block]
    tokens = [token for token, place in places if whole or place == 0]
    heads = model.heads_of(d_rank % decode.tp, decode.tp)
    stage = next(s for s in range(prefill.pp) if LAYER in prefill.layers_of(s, model))
    return {
        (stage, rank)
        for token in tokens
        for head in (heads if whole else heads[:1])
        for rank in theirs.holders(head, total, token // theirs.share(0).interleave % theirs.parts)
    }


def expect_blame(pair: Pair, requests: list[Prompt], d_ranks: list[int], whole: bool, stop: int = 0) -> None:
    """Checks that the victim alone fails, and that decode ranks name the place and who computed it.

    `d_ranks`: those that have wrong KV. The first to notice cancels the ticket on all others, which may come before
    they have compared.
    `stop`: the victim's tokens up to there are wrong. 0: those of its first block on decode.
    """
    victim = requests[VICTIM]
    pair.each(pair.d_ranks, "do", clear_log)
    run(pair, requests)
    received, failed = pair.wait_arrivals(len(requests))
    assert received == {prompt.request_id for prompt in requests if prompt is not victim}
    assert list(failed) == [victim.request_id]
    assert "KV differs from what prefill computed (verify_kv)" in failed[victim.request_id]
    assert set(pair.wait_sent(len(requests))) <= {victim.request_id}  # revoked where its writing was not over
    warnings = pair.each(pair.d_ranks, "warnings")
    assert any("wrong on arrival" in text for texts in warnings for text in texts)
    for n, texts in enumerate(warnings):
        found = [text for text in texts if "wrong on arrival" in text]
        assert len(found) <= (n in d_ranks), (n, texts)
        for text in found:
            assert f"request {victim.request_id}: " in text
            expect_place(pair, text, n % pair.decode.ranks, victim, whole, stop)


def expect_place(pair: Pair, text: str, d_rank: int, victim: Prompt, whole: bool, stop: int = 0) -> None:
    """Checks that a message names the victim's first tokens in layer 1, and who computed them."""
    places = re.findall(r"(\S+) tensor (\d) in blocks ([\d, ]+), from prefill rank (\d+) of stage (\d+)", text)
    wrong = {victim.d_blocks[block] for block in pair.decode.places(d_rank, 0, stop or pair.decode.span)}
    assert {(layer, part) for layer, part, *_ in places} == {(layer_name(LAYER), "0")}
    assert {int(block) for _, _, blocks, *_ in places for block in blocks.split(", ")} == wrong, text
    blamed = {(int(stage), int(rank)) for *_, rank, stage in places}
    assert blamed <= writers_of(pair, d_rank, whole, stop)
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
    is_int8 = bool(pair.model.packings)  # there, rows of several heads are exchanged
    assert found.startswith("the whole block" if is_int8 and fault == "heads" else PATTERNS[fault]), (fault, found)


def hold_back(rank: PrefillRank, ranges: list[tuple[str, int, int]]) -> None:
    """Makes the writes into decode's ranges succeed without writing anything, until `write_late`."""
    begin = TransferEngine.begin
    rank.late = []

    def begin_some(session: str, batch: Batch, *others: Any) -> Flight | None:
        kept = []
        for source, target, size in zip(*batch, strict=True):
            parts = [(target, target + size)]
            for start, stop in [(start, start + length) for s, start, length in ranges if s == session]:
                first, last = max(start, target), min(stop, target + size)
                if first < last:  # pieces of the ranges are apart from each other
                    rank.late.append((session, ([source + first - target], [first], [last - first])))
                    parts = [p for p in ((target, first), (last, target + size)) if p[0] < p[1]]
            kept += [(source + first - target, first, last - first) for first, last in parts]
        sources, targets, sizes = ([copy[i] for copy in kept] for i in range(3))
        return begin(rank.engine, session, (sources, targets, sizes), *others) if kept else None

    rank.engine.begin = begin_some


def stop_holding_back(rank: PrefillRank) -> None:
    rank.engine.__dict__.pop("begin", None)


def write_late(rank: PrefillRank) -> None:
    """Lets what was held back arrive. Prefill has used its memory for something else meanwhile."""
    for session, (sources, targets, sizes) in rank.late:
        ctypes.memset(sources[0], 7, sizes[0])
        flight = TransferEngine.begin(rank.engine, session, (sources, targets, sizes), lambda: True)
        if flight is not None:
            flight.wait()


def test_a_write_that_is_late_is_found_and_blamed_and_so_is_what_it_overwrites(pair: Pair) -> None:
    """The report says that all is written, and a block is not. It arrives when another attempt has the block."""
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [40, 70, 60], seed=20)
    victim = requests[VICTIM]
    holders = [n for n, has in enumerate(pair.each(pair.d_ranks, "do", holds_first, victim)) if has]
    session = pair.descriptions[holders[0]].session
    [place] = [each for each in pair.addresses(LAYER, victim.d_blocks[:1]) if each[0] == session][:1]
    pair.each(pair.p_ranks, "do", hold_back, [place])
    try:
        expect_blame(pair, requests, holders[:1], whole=True)
    finally:
        pair.each(pair.p_ranks, "do", stop_holding_back)
    run(pair, requests)
    expect_delivery(pair, requests)
    pair.each(pair.p_ranks, "do", write_late)
    expect_overwritten(pair, requests, holders[:1])


def reuse_block(rank: PrefillRank, victim: Prompt, other: Prompt) -> None:
    """Gives the victim's first block of layer 1 to another request while it is on its way: it has been computed, and
    is not regrouped or written yet."""

    def submit(device: Any, steps: Any, quantize: Any, computed: Event) -> Event:
        ready = checksums_of_prefill.submit_layer(device, steps, quantize, computed)
        if steps[0][1].described[0].layer != layer_name(LAYER):
            return ready
        cache = rank.caches[layer_name(LAYER)][0]
        return device.submit(lambda: cache[victim.p_blocks[0]].copy_(cache[other.p_blocks[0]]), ready)

    prefill_worker.submit_layer = submit


def keep_blocks(_: PrefillRank) -> None:
    prefill_worker.submit_layer = checksums_of_prefill.submit_layer


def test_a_block_that_is_reused_on_its_way_is_found_and_blamed(pair: Pair) -> None:
    """As with a block that has left its window, and is freed before it is sent."""
    requests = prompts(pair, [40, 70, 60], seed=30)
    victim, other = requests[VICTIM], requests[OTHER]
    holders = [n for n, has in enumerate(pair.each(pair.d_ranks, "do", holds_first, victim)) if has]
    pair.each(pair.p_ranks, "do", reuse_block, victim, other)
    try:
        expect_blame(pair, requests, holders, whole=True, stop=min(pair.prefill.span, victim.num_tokens))
    finally:
        pair.each(pair.p_ranks, "do", keep_blocks)


def announce_early(rank: PrefillRank) -> None:
    """Layer 1 is computed when its checksums have been taken, and before it is regrouped or written."""
    compute, kept = rank.compute, []

    def compute_late(layer: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if layer == LAYER:
            kept.append(copies)
        else:
            compute(layer, copies)

    def submit(device: Any, steps: Any, *others: Any) -> Event:
        ready = checksums_of_prefill.submit_layer(device, steps, *others)
        if steps[0][1].described[0].layer != layer_name(LAYER) or not kept:
            return ready
        return device.submit(partial(compute, LAYER, kept.pop()), ready)

    rank.compute, prefill_worker.submit_layer = compute_late, submit


def compute_in_time(rank: PrefillRank) -> None:
    prefill_worker.submit_layer = checksums_of_prefill.submit_layer
    rank.__dict__.pop("compute", None)


def test_a_layer_that_is_announced_before_it_is_computed_is_found_and_blamed(pair: Pair) -> None:
    """This layer, the requests' blocks and its stage are named."""
    requests = prompts(pair, [40, 70, 60], seed=50)
    pair.each(pair.p_ranks, "do", announce_early)
    try:
        run(pair, requests)
        _, failed = pair.wait_arrivals(len(requests))
        pair.wait_sent(len(requests))
    finally:
        pair.each(pair.p_ranks, "do", compute_in_time)
    assert failed
    stage = next(s for s in range(pair.prefill.pp) if LAYER in pair.prefill.layers_of(s, pair.model))
    blocks_of = {prompt.request_id: set(map(str, prompt.d_blocks)) for prompt in requests}
    for request_id, reason in failed.items():
        for text in reason.partition(": ")[2].split("; "):
            place = re.match(r"(.*) in blocks (.*), from prefill rank \d+ of stage (\d+)", text)
            assert place is not None, reason
            assert {name.partition(" tensor ")[0] for name in place[1].split(", ")} == {layer_name(LAYER)}
            assert set(place[2].partition(" and ")[0].split(", ")) <= blocks_of[request_id]
            assert int(place[3]) == stage


def overwritten(rank: DecodeRank, ticket_ids: list[str]) -> dict[str, tuple[str, list[int]]]:
    """Begins the tickets' first step. Returns what the rank reports of it."""
    rank.worker.take_report()
    rank.worker.start_step(DecodeStep(begun=ticket_ids))
    report = rank.worker.take_report()
    assert (report.verified if report else {}) == ({"overwritten": len(report.overwritten)} if report else {})
    return report.overwritten if report else {}


def expect_overwritten(pair: Pair, requests: list[Prompt], d_ranks: list[int]) -> None:
    """Begins the requests' first step, and checks what these decode ranks report of the victim's first block."""
    victim = requests[VICTIM]
    begun = list(pair._request_of)[-len(requests) :]
    for n, found in enumerate(pair.each(pair.d_ranks, "do", overwritten, begun)):
        assert list(found) == ([victim.request_id] if n in d_ranks else []), found
        for reason, blocks in found.values():
            assert reason.startswith("overwritten later: right on arrival ")
            assert victim.d_blocks[0] in blocks
            expect_place(pair, reason, n % pair.decode.ranks, victim, whole=True)
    assert not any(pair.each(pair.d_ranks, "do", overwritten, begun)), "each is compared again once"


def refuse(rank: DecodeRank) -> None:
    """Makes the device refuse the next work."""
    submit = rank.device.submit

    def refused(*_: Any) -> Event:
        rank.device.submit = submit
        raise DeviceError("refused by the test")

    rank.device.submit = refused


def verified_again(rank: DecodeRank, ticket_ids: list[str]) -> dict[str, int]:
    rank.worker.take_report()
    rank.worker.start_step(DecodeStep(begun=ticket_ids))
    report = rank.worker.take_report()
    return report.verified if report else {}


def test_a_second_comparison_that_the_device_refuses_is_counted(pair: Pair) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [40, 70])
    run(pair, requests)
    expect_delivery(pair, requests)
    pair.each(pair.d_ranks, "do", refuse)
    begun = list(pair._request_of)[-len(requests) :]
    assert pair.each(pair.d_ranks, "do", verified_again, begun) == [{"unknown": 1}] * len(pair.d_ranks)
