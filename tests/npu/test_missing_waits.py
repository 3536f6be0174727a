# SPDX-License-Identifier: Apache-2.0
"""Mutation checks: without any one wait for the device, late streams make decode receive wrong bytes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

import cann_on_host
from harness.kv import Model, Side
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, Pair, prefill, prompts
from vllm_ascend_pd.core.step import PrefillStep
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.device.npu import NpuEvent

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

BLOCK = 128
MODEL = Model(layers=2, widths=(32, 32))
LENGTHS = [BLOCK + 2]

# Before every task of a stream. A layer is four copies (two blocks of K and of V): the stream ends a step some
# seconds after its last layer was queued, and what does not wait is done by then, however busy the machine is.
LATE_US = 150_000
COMPUTE_LATE, SIDE_LATE = (LATE_US, 0), (0, LATE_US)

# What is done to KV on its way: tensor-parallel sizes of prefill and decode.
SIZES = {"direct": (1, 1), "gather": (2, 1), "split": (1, 2), "gather-in-turn": (2, 1)}


class UnawaitedEvent(NpuEvent):
    """Orders streams, but no thread waits for it."""

    def wait(self, timeout_s: float) -> None:
        pass


def computed_long_ago(rank: PrefillRank) -> None:
    """Removes the wait for what the model has queued."""
    past = rank.device.record_event()
    past.wait(30)
    rank.device.record_event = lambda: past


def submitted_without_order(rank: PrefillRank) -> None:
    """The side stream does not wait for the compute stream."""
    past = rank.device.record_event()
    past.wait(30)
    submit = rank.device.submit
    rank.device.submit = lambda work, after: submit(work, past)


def sent_without_waiting(rank: PrefillRank) -> None:
    """The sender does not wait until what it reads is there."""
    submit, record = rank.device.submit, rank.device.record_event

    def unawaited(event: Event) -> Event:
        assert isinstance(event, NpuEvent)
        return UnawaitedEvent(rank.device, event.event)

    rank.device.submit = lambda work, after: unawaited(submit(work, after))
    rank.device.record_event = lambda: unawaited(record())


def buffer_given_up_early(rank: PrefillRank) -> None:
    """A layer is written to a buffer while the layer before it there is being regrouped."""
    rank.worker._turns.wait = lambda layers: None
    rank.worker._turns.add_reads = lambda layer, pushes: None


def set_delays(_: PrefillRank, delays: tuple[int, int]) -> None:
    cann_on_host.set_delays(*delays)


def push(pair: Pair, seed: int, delays: tuple[int, int], mutation: Callable[[PrefillRank], None] | None) -> list[str]:
    """Pushes a new prompt. Returns the wrong bytes on decode after all ranks have reported success."""
    pair.each(pair.p_ranks + pair.d_ranks, "clear")
    requests = prompts(pair, LENGTHS, seed=seed)
    tickets = pair.announce(requests)
    if mutation is not None:
        pair.each(pair.p_ranks, "do", mutation)
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets), {})
    pair.wait_granted()
    pair.each(pair.p_ranks, "do", set_delays, delays)
    prefill(pair, requests, {})
    received, failed = pair.wait_arrivals(len(requests))
    differences = pair.differences(requests)
    pair.each(pair.p_ranks, "do", set_delays, (0, 0))
    pair.each(pair.p_ranks, "drain")  # what is queued still reads and writes memory of this pair
    assert (received, failed) == ({prompt.request_id for prompt in requests}, {})
    assert pair.wait_sent(len(requests)) == {}
    return differences


CASES = [
    ("direct", computed_long_ago, COMPUTE_LATE),
    ("gather", computed_long_ago, COMPUTE_LATE),
    ("split", computed_long_ago, COMPUTE_LATE),
    ("gather", submitted_without_order, COMPUTE_LATE),
    ("split", submitted_without_order, COMPUTE_LATE),
    ("direct", sent_without_waiting, COMPUTE_LATE),
    ("gather", sent_without_waiting, SIDE_LATE),
    ("split", sent_without_waiting, SIDE_LATE),
    ("gather-in-turn", buffer_given_up_early, SIDE_LATE),
]


@pytest.mark.parametrize(("work", "mutation", "delays"), CASES, ids=[f"{w}-{m.__name__}" for w, m, _ in CASES])
def test_a_missing_wait_delivers_wrong_bytes(
    work: str, mutation: Callable[[PrefillRank], None], delays: tuple[int, int], make_pair: MakePair
) -> None:
    prefill_side, decode_side = (Side(tp, num_blocks=8, block_size=BLOCK) for tp in SIZES[work])
    if work.endswith("in-turn"):
        prefill_side = replace(prefill_side, buffers=1)
    pair = make_pair(MODEL, prefill_side, decode_side, device="npu")
    unmutated = push(pair, 1, delays, mutation=None)
    mutated = push(pair, 2, delays, mutation)
    assert unmutated == []
    assert mutated != []
