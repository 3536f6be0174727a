# SPDX-License-Identifier: Apache-2.0
"""Faults of requests: clients leave, engines run out of blocks, or decode recomputes KV that has not arrived."""

import random
import signal
import time

from faults.process_faults import kill_while_pushing
from faults.scenario import FEW_BLOCKS, RECOMPUTE, SLOW_S, Scenario, adds_to
from faults.traffic import Answer
from faults.transfer_faults import fail_always, lose_reports, writes
from faults.world import World, leave
from harness.client import at_once

SCENARIOS: list[Scenario] = []
scenario = adds_to(SCENARIOS)


# 7. Clients that leave.


@scenario(7, "clients leave at every stage")
def leave_at_every_stage(world: World) -> list[Answer]:
    stay, going = world.requests(8), [request for request, _ in world.requests(24)]
    moments = [0.02 * 1.25**i for i in range(len(going))]  # to 3.4 s
    volley = world.send(stay)
    left = at_once(lambda one: leave(world, *one), list(zip(going, moments, strict=True)), len(going))
    return left + volley.answers()


@scenario(7, "500 aborts in a storm")
def storm(world: World) -> list[Answer]:
    chance = random.Random(5)
    shapes = world.requests(8)
    going = [request for request, _ in (world.requests(20) * 25)]
    volley = world.send(shapes)
    left = at_once(lambda request: leave(world, request, chance.uniform(0.01, 0.8)), going, 64)
    return left + volley.answers()


@scenario(7, "aborts while requests queue for prefill")
def leave_the_queue(world: World) -> list[Answer]:
    stay, going = world.requests(8), [request for request, _ in world.requests(24)]
    with world.writes("slow", seconds=SLOW_S):
        volley = world.send(stay)
        left = at_once(lambda request: leave(world, request, 1.0), going, len(going))
    return left + volley.answers()


# 8. No blocks.


@scenario(8, "few blocks on either side", shape=FEW_BLOCKS, absorbed=True)
def few_blocks(world: World) -> list[Answer]:
    with world.writes("slow", times=40, seconds=0.02):
        return world.complete(24)


@scenario(8, "few blocks, batches fail", shape=FEW_BLOCKS)
def few_blocks_failing(world: World) -> list[Answer]:
    return writes(world, "fail", times=6)


@scenario(8, "few blocks, decode stands still again and again: prefill preempts", shape=FEW_BLOCKS)
def few_blocks_preempted(world: World) -> list[Answer]:
    volley = world.send(world.requests(16))
    try:
        while volley.in_flight:
            world.decode.process.signal_group(signal.SIGSTOP)
            time.sleep(0.3)
            world.decode.process.signal_group(signal.SIGCONT)
            time.sleep(0.4)
    finally:
        world.decode.process.signal_group(signal.SIGCONT)
    return volley.answers()


@scenario(8, "few blocks, clients leave", shape=FEW_BLOCKS)
def few_blocks_left(world: World) -> list[Answer]:
    return leave_at_every_stage(world)


# 9. Decode computes what did not arrive.


@scenario(9, "all batches fail", shape=RECOMPUTE, absorbed=True)
def recompute_failed(world: World) -> list[Answer]:
    return fail_always(world)


@scenario(9, "all reports lost", shape=RECOMPUTE)
def recompute_unreported(world: World) -> list[Answer]:
    return lose_reports(world)


@scenario(9, "prefill killed while it pushes layers", shape=RECOMPUTE, absorbed=True)
def recompute_killed(world: World) -> list[Answer]:
    return kill_while_pushing(world)
