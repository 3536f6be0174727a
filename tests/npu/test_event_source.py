# SPDX-License-Identifier: Apache-2.0
"""A layer is pushed when its cache is written, and not when its attention has run, if vllm-ascend calls the hook."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cann_on_host
from harness.kv import GQA, Prompt, Side, layer_name
from harness.ranks import Pair, prompts
from vllm_ascend_pd.core.step import PrefillStep, Send

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

SIDE = Side(1, num_blocks=8, block_size=128)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(GQA, SIDE, SIDE, device="npu")
    yield made
    made.each(made.p_ranks, "do", go_on)
    assert made.close() == []


def step_with_hanging_attention(rank: Any, step: PrefillStep, prompt: Prompt, told: str | None) -> None:
    """One forward pass whose last layer's attention hangs. `told`: the name the layer is announced with when its
    cache is written, None if it is not."""
    attention = torch.zeros(8, device="npu")
    values = {layer: rank._values(layer, prompt, step.sends[0]) for layer in rank.side.layers_of(0, rank.model)}
    torch.npu.synchronize()
    rank.worker.start_step(step)
    for layer, copies in values.items():
        rank.compute(layer, copies)
        if layer == max(values):
            if told is not None:
                rank.worker.mark_cached(told)
            torch.npu.current_stream().record_event().synchronize()  # the next task to run is the attention
            cann_on_host.inject("task:hang")
            attention.add_(1)
        rank.worker.push_layer(layer_name(layer))
    rank.worker.end_step()


def go_on(rank: Any) -> None:
    cann_on_host.clear_faults()
    torch.npu.synchronize()


def prefill(pair: Pair, told: str | None) -> list[Prompt]:
    [prompt] = requests = prompts(pair, [300])
    tickets = pair.announce(requests)
    send = Send(prompt.request_id, 0, prompt.num_tokens, (prompt.p_blocks,), last=True)
    step = PrefillStep(tickets=tickets, sends=[send])
    pair.each(pair.p_ranks, "do", step_with_hanging_attention, step, prompt, told)
    return requests


@pytest.mark.parametrize("told", ["", layer_name(GQA.layers - 1)], ids=["unnamed", "named"])
def test_a_layer_is_sent_while_its_attention_runs(pair: Pair, told: str) -> None:
    requests = prefill(pair, told)
    received, failed = pair.wait_arrivals(1, timeout_s=20)
    assert (received, failed) == ({requests[0].request_id}, {})
    assert pair.differences(requests) == []


@pytest.mark.parametrize("told", [None, layer_name(0)], ids=["untold", "another-layer"])
def test_else_it_is_sent_when_all_that_was_queued_has_run(pair: Pair, told: str | None) -> None:
    requests = prefill(pair, told)
    with pytest.raises(TimeoutError):
        pair.wait_arrivals(1, timeout_s=3)
    pair.each(pair.p_ranks, "do", go_on)
    received, failed = pair.wait_arrivals(1, timeout_s=20)
    assert (received, failed) == ({requests[0].request_id}, {})
    assert pair.differences(requests) == []
