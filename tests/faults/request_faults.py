# SPDX-License-Identifier: Apache-2.0
"""Faults of requests: clients leave, engines run out of blocks, or decode recomputes KV that has not arrived."""

import random
import time
from collections.abc import Callable

from faults.process_faults import kill_while_pushing
from faults.scenario import FEW_BLOCKS, RECOMPUTE, SLOW_S, Scenario, stopped
from faults.traffic import Answer
from faults.transfer_faults import side_channel, writes
from faults.world import World, leave
from harness.client import at_once
from harness.wire import Rule
from vllm_ascend_pd.core.protocol import WriteReport


def leave_at(world: World, moment: Callable[[int], float]) -> list[Answer]:
    """24 of 32 clients leave, each after so many seconds."""
    stay, going = world.requests(8), [request for request, _ in world.requests(24)]
    volley = world.send(stay)
    left = at_once(lambda i: leave(world, going[i], moment(i)), range(len(going)), len(going))
    return left + volley.answers()


def leave_at_every_stage(world: World) -> list[Answer]:
    return leave_at(world, lambda i: 0.02 * 1.25**i)  # to 3.4 s


def storm(world: World) -> list[Answer]:
    chance = random.Random(5)
    shapes = world.requests(8)
    going = [request for request, _ in (world.requests(20) * 25)]
    volley = world.send(shapes)
    left = at_once(lambda request: leave(world, request, chance.uniform(0.01, 0.8)), going, 64)
    return left + volley.answers()


def leave_the_queue(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        return leave_at(world, lambda _: 1.0)


def few_blocks(world: World) -> list[Answer]:
    with world.writes("slow", times=40, seconds=0.02):
        return world.complete(24)


def few_blocks_preempted(world: World) -> list[Answer]:
    volley = world.send(world.requests(16))
    while volley.in_flight:
        with stopped(world.decode):
            time.sleep(0.3)
        time.sleep(0.4)
    return volley.answers()


SCENARIOS = [
    # Clients that leave.
    Scenario(7, "clients leave at every stage", leave_at_every_stage, short=True),
    Scenario(7, "500 aborts in a storm", storm),
    Scenario(7, "aborts while requests queue for prefill", leave_the_queue),
    # No blocks.
    Scenario(8, "few blocks on either side", few_blocks, FEW_BLOCKS, absorbed=True),
    Scenario(8, "few blocks, batches fail", lambda w: writes(w, "fail", times=6), FEW_BLOCKS),
    Scenario(8, "few blocks, decode stands still again and again: prefill preempts", few_blocks_preempted, FEW_BLOCKS),
    Scenario(8, "few blocks, clients leave", leave_at_every_stage, FEW_BLOCKS),
    # Decode computes what did not arrive.
    Scenario(9, "all batches fail", lambda w: writes(w, "fail"), RECOMPUTE, absorbed=True),
    Scenario(9, "all reports lost", lambda w: side_channel(w, Rule(WriteReport, "lose")), RECOMPUTE),
    Scenario(9, "prefill killed while it pushes layers", kill_while_pushing, RECOMPUTE, absorbed=True),
]
