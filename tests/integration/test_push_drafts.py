# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as prefill's ranks see it: layers of a draft behind those of the model, saved in whatever order
and as often as a model runner likes, and steps that nobody ends. Real processes, real gloo, real Mooncake, no model."""

import pytest

from harness.kv import Model, Side, layer_name
from harness.rank_programs import DecodeRank, Hooks, PrefillRank
from harness.ranks import MakePair, Pair, expect_delivery, pair_of_each, prompts, run
from vllm_ascend_pd.core.step import PrefillStep, Send

DRAFTING = Model(layers=3, drafts=1)
PLAIN = Model(layers=2)
BLOCK_BYTES = 16 * 4 * (32 + 32) * 2  # K and V of 16 tokens, 4 heads in bfloat16

PAIRS = {
    "TP2_TO_TP1": (DRAFTING, Side(2), Side(1)),
    "TP1_TO_TP1": (DRAFTING, Side(1), Side(1)),
    "TP1_TO_TP2": (DRAFTING, Side(1), Side(2)),
    "PP2_TO_TP1": (DRAFTING, Side(1, stages=(1, 2)), Side(1)),
}
HOOKS = {
    "the draft's several times": Hooks(saved=(0, 1, 2, 2, 2)),
    "the draft's first": Hooks(saved=(2, 0, 1)),
    "all but the draft's, twice": Hooks(saved=(0, 1, 0, 1)),
    "none": Hooks(saved=()),
    "a step that nobody ends": Hooks(saved=(0, 1), ended=False),
}


pair = pair_of_each(PAIRS)


def received_bytes(rank: DecodeRank) -> int:
    return rank.received_bytes


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS.keys())
def test_every_layer_is_sent_once(pair: Pair, hooks: Hooks) -> None:
    pair.each(pair.d_ranks, "clear")
    before = sum(pair.each(pair.d_ranks, "do", received_bytes))
    requests = prompts(pair, [50, 100])
    run(pair, requests, chunk=64, hooks=hooks)
    expect_delivery(pair, requests)
    blocks = sum(len(prompt.d_blocks) for prompt in requests)
    assert sum(pair.each(pair.d_ranks, "do", received_bytes)) - before == blocks * BLOCK_BYTES * DRAFTING.layers


def preempt(rank: PrefillRank, request_id: str) -> None:
    """The request loses its blocks, and others overwrite them."""
    rank.worker.preempted(PrefillStep(preempted={request_id}))
    rank.clear()


def test_preemption_waits_for_a_step_that_nobody_ended(pair: Pair) -> None:
    pair.each(pair.d_ranks, "clear")
    [request] = requests = prompts(pair, [50])
    tickets = pair.announce(requests)
    by_id = {request.request_id: request}
    first = Send(request.request_id, 0, 32, (request.p_blocks[:2],), last=False)
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets, sends=[first]), by_id, Hooks(saved=(), ended=False))
    pair.each(pair.p_ranks, "do", preempt, request.request_id)
    rest = Send(request.request_id, 32, 50, (request.p_blocks[2:],), last=True)
    pair.each(pair.p_ranks, "step", PrefillStep(sends=[rest]), by_id)
    pair.each(pair.p_ranks, "step", PrefillStep(finished={request.request_id: None}), by_id)
    expect_delivery(pair, requests)


def is_blank(rank: DecodeRank, layer: int) -> bool:
    return not any(cache.any() for cache in rank.caches[layer_name(layer)])


@pytest.mark.parametrize(("decode", "prefill"), [(DRAFTING, PLAIN), (PLAIN, DRAFTING)], ids=["decode", "prefill"])
def test_a_draft_on_one_side_alone(decode: Model, prefill: Model, make_pair: MakePair) -> None:
    """Its KV is not sent, and prefill says so once where decode would have needed it."""
    pair = make_pair(decode, Side(2), Side(1), p_model=prefill)
    for _ in range(2):
        requests = prompts(pair, [50, 100])
        run(pair, requests, chunk=64)
        received, failed = pair.wait_arrivals(len(requests))
        assert (received, failed) == ({prompt.request_id for prompt in requests}, {})
        wrong = pair.differences(requests)
        assert [where for where in wrong if "layer 2" not in where] == []
        assert bool(wrong) == (decode is DRAFTING)  # the draft's layer lacks the truth
        assert decode is PLAIN or pair.d_ranks[0].call("do", is_blank, 2)
        assert pair.wait_sent(len(requests)) == {}
    said = [sum("the draft's KV" in text for text in texts) for texts in pair.each(pair.p_ranks, "warnings")]
    assert said == [int(decode is DRAFTING)] * 2
