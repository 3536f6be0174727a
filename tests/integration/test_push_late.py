# SPDX-License-Identifier: Apache-2.0
"""Tickets that come when their prompts are computed, in whole or in part: decode's bytes equal the truth."""

import dataclasses

import pytest

from harness.kv import GQA, Prompt, Side
from harness.ranks import Pair, expect_delivery, pair_of_each, prompts
from test_push import SHAPES
from vllm_ascend_pd.core.step import PrefillStep, Send, rank_address
from vllm_ascend_pd.transport.wakeup import WakeupSender, new_address

LATE = {
    "TP1_TO_TP1": (GQA, Side(1), Side(1)),
    **{
        name: SHAPES[name]
        for name in (
            "GQA_TP4_TO_TP2",
            "BLOCK_16_TO_32_TP2_TO_TP1",
            "PP2_TP2_TO_PP2_TP1_WITH_OTHER_LAYERS",
            "MLA_DCP2_TO_TP1",
        )
    },
}


pair = pair_of_each(LATE)


def whole(prompt: Prompt) -> Send:
    return Send(prompt.request_id, prompt.cached, prompt.num_tokens, _blocks(prompt, prompt.cached), last=True)


def computed(prompt: Prompt) -> Send:
    """Of a prompt that earlier steps have computed."""
    return dataclasses.replace(whole(prompt), was_computed=True)


def _blocks(prompt: Prompt, start: int) -> tuple[list[int], ...]:
    span = -(-prompt.num_tokens // len(prompt.p_blocks))
    return (prompt.p_blocks[start // span :] if start else prompt.p_blocks,)


def by_id(requests: list[Prompt]) -> dict[str, Prompt]:
    return {prompt.request_id: prompt for prompt in requests}


def test_when_the_prompts_are_computed(pair: Pair) -> None:
    """The step that gets the tickets runs no model. A staging slot holds only a part of the longest prompt."""
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [1, 17, 100, 300])
    sends = [computed(prompt) for prompt in requests]
    pair.each(pair.p_ranks, "compute_unsent", sends, by_id(requests))
    step = PrefillStep(tickets=pair.announce(requests), sends=sends, late=set(by_id(requests)), computes=False)
    pair.each(pair.p_ranks, "step", step, by_id(requests))
    pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id(requests)), computes=False), {})
    expect_delivery(pair, requests)
    assert pair.each(pair.p_ranks, "open_transfers") == [0] * len(pair.p_ranks)


def test_while_prefill_computes_something_else(pair: Pair) -> None:
    """A late prompt and one that has just been computed leave in the same step, to the same decode engine."""
    pair.each(pair.d_ranks, "clear")
    late, new = requests = prompts(pair, [100, 64])
    pair.each(pair.p_ranks, "compute_unsent", [whole(late)], by_id(requests))
    step = PrefillStep(tickets=pair.announce(requests), sends=[computed(late), whole(new)], late={late.request_id})
    for rank in pair.p_ranks:
        rank.send("step", step, by_id(requests))
    for rank in pair.p_ranks:
        rank.receive()
    pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id(requests)), computes=False), {})
    expect_delivery(pair, requests)


@pytest.mark.parametrize("pair", ["TP1_TO_TP1"], indirect=True)
def test_a_computed_prompt_does_not_wait_for_the_layers_of_a_step(pair: Pair) -> None:
    """It arrives before the first of them, and although the forward pass then fails."""
    pair.each(pair.d_ranks, "clear")
    late, lost = requests = prompts(pair, [100, 64])
    pair.each(pair.p_ranks, "compute_unsent", [whole(late)], by_id(requests))
    sends = [computed(late), whole(lost)]
    pair.each(pair.p_ranks, "begin_step", PrefillStep(tickets=pair.announce(requests), sends=sends))
    assert pair.wait_arrivals(1, 30.0) == ({late.request_id}, {})
    pair.each(pair.p_ranks, "begin_step", PrefillStep(finished=dict.fromkeys(by_id(requests)), computes=False))
    received, failed = pair.wait_arrivals(1, 30.0)
    assert (received, [*failed]) == (set(), [lost.request_id])
    assert [*pair.wait_sent(2, 30.0)] == [lost.request_id]
    assert pair.differences([late]) == []


def test_a_ticket_ends_the_wait_of_a_step(pair: Pair) -> None:
    """No rank would return before the test gives up."""
    address, sender = new_address(), WakeupSender()
    step = PrefillStep(awaits_tickets=True, wakeup_address=address, wait_s=100.0, computes=False)
    pair.each(pair.p_ranks, "step", step, {})
    for rank in pair.p_ranks:
        rank.send("sent")
    for pp_rank in range(pair.prefill.pp):
        for number in range(pair.prefill.ranks):
            sender.wake(rank_address(address, pp_rank, number))
    for rank in pair.p_ranks:
        assert rank.receive(30.0) == (set(), {})
    sender.close()


def test_no_ticket_comes(pair: Pair) -> None:
    """The ranks tell vLLM that it may free the blocks, once."""
    pair.each(pair.p_ranks, "step", PrefillStep(unsent={"held"}, computes=False), {})
    assert pair.each(pair.p_ranks, "sent") == [({"held"}, {})] * len(pair.p_ranks)
    assert pair.each(pair.p_ranks, "sent") == [(set(), {})] * len(pair.p_ranks)
