# SPDX-License-Identifier: Apache-2.0
"""A request that decode preempted gets another ticket: the bytes that it brings, in real processes."""

import dataclasses

from harness.kv import FLOAT32, Prompt, Side
from harness.ranks import Pair, expect_delivery, pair_of_each, prefill, prompts, run

PATIENCE_S = 60.0
KEPT = 32
"""Tokens of the prompt whose blocks decode has kept."""

SHAPES = {"blocks of 32 to 16": (FLOAT32, Side(2, block_size=32), Side(1, num_blocks=128))}


pair = pair_of_each(SHAPES, scope="function", afresh=True)


def grown(first: Prompt, other: Prompt) -> Prompt:
    """The request with generated tokens. What decode has not kept is in the other one's blocks."""
    kept = KEPT // 16
    return dataclasses.replace(
        other,
        request_id=first.request_id,
        seed=first.seed,
        d_blocks=first.d_blocks[:kept] + other.d_blocks[kept:],
        cached=KEPT,
    )


def test_a_second_ticket_that_is_lost_writes_nothing_and_the_third_brings_all(pair: Pair) -> None:
    first, other, another = prompts(pair, [40, 75, 80])
    run(pair, [first])
    expect_delivery(pair, [first], PATIENCE_S)
    second = grown(first, other)
    lost = pair.announce([second])
    pair.cancel({ticket.ticket_id: "no answer from the metaserver" for ticket in lost.values()})
    assert pair.wait_arrivals(1, PATIENCE_S)[0] == set()
    prefill(pair, [second], lost)  # it was not lost, but late
    assert pair.wait_sent(1, PATIENCE_S).keys() == {first.request_id}
    third = grown(first, another)
    run(pair, [third])
    assert pair.wait_arrivals(1, PATIENCE_S) == ({first.request_id}, {})
    assert pair.wait_sent(1, PATIENCE_S) == {}
    everything = dataclasses.replace(third, cached=0)
    assert pair.differences([everything, dataclasses.replace(first, cached=KEPT)]) == []
