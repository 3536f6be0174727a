# SPDX-License-Identifier: Apache-2.0
"""A prefill engine that keeps the KV of a few layers only: layers use its buffers in turn, as vllm-ascend 0.30 lets
them. A buffer is overwritten only when nothing reads it any more (R3). Real processes, real gloo, real Mooncake."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from harness.kv import Model, Side, layer_name
from harness.rank_programs import Hooks, PrefillRank
from harness.ranks import MakePair, Pair, expect_delivery, expect_failure, pair_of_each, prefill, prompts, run
from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.step import PrefillStep, Send
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.prefill.step_send import LayerPush

LAYERS, BUFFERS = 12, 4
MODEL = Model(layers=LAYERS)
PACKED = replace(MODEL, order=Order.HEAD_MAJOR, widths=(64,))
QUICK = {"grant_timeout_s": 2.0, "control_timeout_s": 1.0, "write_timeout_s": 2.0}
PAIRS = {
    "direct": (MODEL, Side(1, buffers=BUFFERS), Side(1), QUICK),
    "packed": (PACKED, Side(2, buffers=BUFFERS), Side(1), QUICK),
    "gathered": (MODEL, Side(2, buffers=BUFFERS), Side(1), QUICK),
    "split": (MODEL, Side(1, buffers=BUFFERS), Side(2), QUICK),
    "stages": (MODEL, Side(1, stages=(7, 5), buffers=BUFFERS), Side(1), QUICK),
}


pair = pair_of_each(PAIRS, scope="function")


def slow_down(rank: PrefillRank) -> None:
    """Delays the side stream, which regroups, and every write."""
    submit = rank.device.submit

    def late(work: Callable[[], None], after: Event) -> Event:
        def delayed() -> None:
            time.sleep(0.02)
            work()

        return submit(delayed, after)

    rank.device.submit = late
    rank.slow_down(0.02)


def test_every_layer_arrives_though_all_is_slow(pair: Pair) -> None:
    pair.each(pair.p_ranks, "do", slow_down)
    requests = prompts(pair, [50, 100, 130])
    run(pair, requests, chunk=64)
    expect_delivery(pair, requests)


def registered_bytes(rank: PrefillRank) -> int:
    return sum(size for _, size in rank.registered.regions())


def test_prefill_has_a_third_of_the_memory(make_pair: MakePair) -> None:
    sizes = []
    for side in (Side(1), Side(1, buffers=BUFFERS)):
        sizes += [rank.call("do", registered_bytes) for rank in make_pair(MODEL, side, Side(1)).p_ranks]
    assert sizes[0] == sizes[1] * LAYERS // BUFFERS


def give_up_early(rank: PrefillRank) -> None:
    """A guard is taken out: a buffer is given up as soon as the layer's reads are queued."""
    read = rank.worker._turns.add_reads

    def early(layer: str, pushes: list[LayerPush]) -> None:
        for push in pushes:
            push.over.set()
        read(layer, pushes)

    rank.worker._turns.add_reads = early
    LayerPush.is_staged = lambda push, timeout_s: True


@pytest.mark.long
@pytest.mark.parametrize("name", ["direct", "gathered"])
def test_a_buffer_that_is_given_up_early_delivers_wrong_bytes(name: str, make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS[name])
    for rank in pair.p_ranks:
        rank.retire()  # the class changes there
    pair.each(pair.p_ranks, "do", slow_down)
    pair.each(pair.p_ranks, "do", give_up_early)
    requests = prompts(pair, [50, 100])
    run(pair, requests)
    pair.wait_arrivals(2)
    assert pair.differences(requests) != []


def never_waits(rank: PrefillRank) -> None:
    """A model runner that does not wait before it overwrites a buffer."""
    rank.worker._turns.wait = lambda layers: None


def test_a_model_runner_that_does_not_wait_ends_the_engine(make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS["direct"])
    pair.each(pair.p_ranks, "do", never_waits)
    with pytest.raises(RuntimeError, match=r"may still be sent: vllm-ascend did not wait for it"):
        run(pair, prompts(pair, [50]))


def test_what_is_not_granted_in_time_gives_its_buffer_up(make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS["direct"])
    ungranted, granted = requests = prompts(pair, [64, 64])
    tickets = {ungranted.request_id: pair.ticket(ungranted)} | pair.announce([granted])  # decode is told of one
    prefill(pair, requests, tickets)
    assert pair.wait_sent(2).keys() == {"request-0"}
    received, failed = pair.wait_arrivals(1)
    assert (received, failed) == ({"request-1"}, {})
    assert pair.differences([granted]) == []


def test_a_lost_write_that_may_still_read_holds_its_buffer(make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS["direct"])
    [rank] = pair.p_ranks
    rank.call("lose_writes", 1, True)
    requests = prompts(pair, [40])
    run(pair, requests)
    settled = rank.call("do", settled_before_overwritten)
    assert settled


def settled_before_overwritten(rank: PrefillRank) -> bool:
    until = max(t.state.settled_at for t in rank.worker._transfers.values())
    return bool(rank.worker._rank.running_time() >= until)


@pytest.mark.parametrize("hooks", [Hooks(saved=()), Hooks(saved=tuple(range(LAYERS - 1)))], ids=["none", "all but one"])
def test_a_layer_that_nobody_announces_fails_its_requests(hooks: Hooks, make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS["direct"])
    run(pair, prompts(pair, [40]), hooks=hooks)
    expect_failure(pair, "another layer may have overwritten the KV of model.layers.")


def test_a_ticket_that_comes_after_the_prompt_was_computed_fails(make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS["direct"])
    [prompt] = prompts(pair, [40])
    tickets = pair.announce([prompt])
    send = Send(prompt.request_id, 0, prompt.num_tokens, (prompt.p_blocks,), last=True)
    step = PrefillStep(tickets=tickets, sends=[send], late={prompt.request_id}, computes=False)
    pair.each(pair.p_ranks, "step", step, {prompt.request_id: prompt})
    pair.each(pair.p_ranks, "step", PrefillStep(finished={prompt.request_id: None}), {})
    expect_failure(pair, "prefill keeps the KV of a few layers at a time")


def overwritten_by_a_loader(rank: PrefillRank) -> None:
    """Another thread waits for buffers, as AscendStore's does before it loads the next layer's KV from its pool."""
    loads, loaded = queue.SimpleQueue[int](), {layer: threading.Event() for layer in range(LAYERS)}
    compute, wait = rank.compute, rank.worker.await_buffer

    def load() -> None:
        for layer in iter(loads.get, -1):
            wait(layer_name(layer))
            for part in rank.caches[layer_name(layer)]:
                part.fill_(7)  # what the pool has of other requests
            loaded[layer].set()

    def prefetching(layer: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if layer < BUFFERS:
            loads.put(layer)
        assert loaded[layer].wait(30)
        loaded[layer].clear()
        compute(layer, copies)

    written = rank.worker.push_layer

    def saved(layer: str) -> None:
        rank.worker.mark_cached("")  # vllm-ascend's dense attention does not say which
        after = int(layer.split(".")[2]) + BUFFERS
        if after < LAYERS:
            loads.put(after)  # before the reads of this layer are queued: the wait includes them
        time.sleep(0.005)
        written(layer)

    rank.worker.await_buffer = lambda layer: None
    rank.worker.push_layer = saved
    rank.compute = prefetching
    threading.Thread(target=load, name="loader", daemon=True).start()


def test_a_thread_that_loads_kv_into_buffers_waits_for_their_reads(make_pair: MakePair) -> None:
    pair = make_pair(*PAIRS["direct"])
    pair.each(pair.p_ranks, "do", slow_down)
    pair.each(pair.p_ranks, "do", overwritten_by_a_loader)
    requests = prompts(pair, [50, 100])
    run(pair, requests)
    expect_delivery(pair, requests)
