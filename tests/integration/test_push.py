# SPDX-License-Identifier: Apache-2.0
"""Bytes on decode equal the truth: real processes, real gloo, real Mooncake over TCP, no model."""

import random
from collections.abc import Iterator

import pytest

from harness.ranks import Model, Pair, Prompt, Side
from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.step import ConsumerStep, Expect, ProducerStep, Send

GQA = Model()
HEAD_MAJOR = Model(order=Order.HEAD_MAJOR, widths=(64,))
MLA = Model(widths=(128, 16), replicated=True)


def expect(pair: Pair, prompt: Prompt, ticket) -> Expect:
    return Expect(prompt.request_id, ticket.ticket_id, 0, ticket.digest(), prompt.d_blocks[prompt.cached :])


def prompts(pair: Pair, lengths: list[int], cached: int = 0) -> list[Prompt]:
    """Requests with random, disjoint blocks on either side."""
    chance = random.Random(7)
    p_free = chance.sample(range(pair.prefill.num_blocks), pair.prefill.num_blocks)
    d_free = chance.sample(range(pair.decode.num_blocks), pair.decode.num_blocks)
    made = []
    for i, length in enumerate(lengths):
        p_blocks = [p_free.pop() for _ in range(-(-length // pair.prefill.block_size))]
        d_blocks = [d_free.pop() for _ in range(-(-length // pair.decode.block_size))]
        made.append(Prompt(f"request-{i}", i, length, p_blocks, d_blocks, min(cached, length - 1)))
    return made


def run(pair: Pair, requests: list[Prompt], chunk: int | None = None) -> None:
    """All requests at once, each step computing up to `chunk` tokens of each."""
    tickets = {p.request_id: pair.ticket(p) for p in requests}
    by_id = {p.request_id: p for p in requests}
    pair.each(pair.d_ranks, "step", ConsumerStep([expect(pair, p, tickets[p.request_id]) for p in requests]))
    cursor = {p.request_id: p.cached for p in requests}
    align = max(pair.prefill.block_size, pair.decode.block_size)
    first = True
    while any(cursor[p.request_id] < p.num_tokens for p in requests):
        step = ProducerStep(tickets=tickets if first else {})
        for p in requests:
            start = cursor[p.request_id]
            done = min(p.num_tokens, start + (chunk or p.num_tokens))
            stop = done if done == p.num_tokens else done - done % align
            if start == p.num_tokens:
                continue
            size = pair.prefill.block_size
            blocks = (p.p_blocks[start // size : -(-stop // size)],)
            step.sends.append(Send(p.request_id, start, stop, blocks, last=stop == p.num_tokens))
            cursor[p.request_id] = stop
        pair.each(pair.p_ranks, "step", step, by_id)
        first = False
    pair.each(pair.p_ranks, "step", ProducerStep(finished={p.request_id: None for p in requests}), by_id)


SHAPES = {
    "GQA_TP4_TO_TP2": (GQA, Side(4), Side(2)),
    "GQA_TP4_TO_TP1": (GQA, Side(4), Side(1)),
    "GQA_TP2_TO_TP4": (GQA, Side(2), Side(4)),
    "GQA_TP1_TO_TP2": (GQA, Side(1), Side(2)),
    "GQA_TP2_TO_TP2": (GQA, Side(2), Side(2)),
    "HEAD_MAJOR_TP2_TO_TP1": (HEAD_MAJOR, Side(2), Side(1)),
    "HEAD_MAJOR_TP1_TO_TP2": (HEAD_MAJOR, Side(1), Side(2)),
    "MLA_TP2_TO_TP1": (MLA, Side(2), Side(1)),
    "BLOCK_32_TO_16_TP2_TO_TP1": (GQA, Side(2, block_size=32), Side(1, block_size=16)),
    "PP2_TP1_TO_TP2": (GQA, Side(1, stages=(1, 2)), Side(2)),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(*request.param)
    yield made
    made.close()


def test_bytes_arrive(pair: Pair) -> None:
    requests = prompts(pair, [1, 15, 16, 17, 100])
    run(pair, requests)
    received, failed = pair.wait_arrivals(len(requests))
    assert not failed
    assert received == {p.request_id for p in requests}
    assert pair.differences(requests) == []
    assert pair.wait_sent(len(requests)) == {}
    assert pair.each(pair.p_ranks, "open_transfers") == [0] * len(pair.p_ranks)
