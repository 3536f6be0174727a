# SPDX-License-Identifier: Apache-2.0
"""Faults of transfers: messages of the side channel or Mooncake's writes are lost, delayed, repeated, or fail."""

import time

from faults.scenario import Scenario, pushing, stopped
from faults.traffic import Answer
from faults.world import World
from harness.wire import Fault, Rule
from vllm_ascend_pd.core.protocol import Acknowledged, Describe, EngineDescription, Granted, GrantRequest, WriteReport

EVERY_KIND = (Describe, EngineDescription, GrantRequest, Granted, WriteReport, Acknowledged)


def side_channel(world: World, *rules: Rule) -> list[Answer]:
    requests = world.requests()
    with world.channel.ruled(*rules):
        answers = world.send(requests).answers()
    assert all(rule.done for rule in rules if rule.kind not in (Describe, EngineDescription))
    return answers


def replay_messages(world: World) -> list[Answer]:
    world.channel.record()
    answers = world.complete(8)
    with pushing(world) as volley:
        assert world.channel.replay() >= 16
    return answers + volley.answers()


def break_side_channel(world: World, fault: Fault) -> list[Answer]:
    with pushing(world) as volley, world.channel.broken(fault):
        time.sleep(8)
    return volley.answers()


def writes(world: World, fault: str, times: int | None = None, seconds: float = 0.0) -> list[Answer]:
    requests = world.requests()
    with world.writes(fault, times, seconds):
        return world.send(requests).answers()


def fill_queue(world: World) -> list[Answer]:
    """Fills Mooncake's queue, which is short in this suite. No descriptor may be refused, not in earlier faults either,
    because that might stop Mooncake for good (`transport/tcp.py`).
    """
    requests = world.requests()
    with world.sessions.data.broken(Fault(delay_s=0.005)):
        answers = world.send(requests).answers()
    assert "queue-full" not in world.prefill.log.read_text(errors="replace")
    return answers


def reset_data(world: World) -> list[Answer]:
    requests = world.requests()
    before = world.sessions.data.connections
    with world.sessions.data.broken(Fault(cut_after=200_000)):
        world.sessions.data.reset()
        volley = world.send(requests)
        time.sleep(4)
    assert world.sessions.data.connections > before
    return volley.answers()


def stall_data(world: World) -> list[Answer]:
    requests = world.requests()
    with world.sessions.data.broken(Fault(stall=True)):
        volley = world.send(requests)
        time.sleep(6)
    return volley.answers()


def cut_data(world: World) -> list[Answer]:
    requests = world.requests()
    with world.sessions.broken(Fault(refuse=True)), world.sessions.data.broken(Fault(refuse=True)):
        volley = world.send(requests)
        time.sleep(4)
    return volley.answers()


def stop_decode(world: World) -> list[Answer]:
    with pushing(world) as volley:
        with stopped(world.decode):
            time.sleep(6)
        return volley.answers()


SCENARIOS = [
    # The side channel.
    Scenario(
        5,
        "messages lost: the first two of each kind",
        lambda w: side_channel(w, *(Rule(kind, "lose", times=2) for kind in EVERY_KIND)),
        absorbed=True,
    ),
    Scenario(5, "all reports lost", lambda w: side_channel(w, Rule(WriteReport, "lose"))),
    Scenario(5, "all grants lost", lambda w: side_channel(w, Rule(Granted, "lose"))),
    Scenario(
        5,
        "messages delayed by 0.4 s, overtaken by others",
        lambda w: side_channel(w, *(Rule(k, "late", seconds=0.4) for k in (GrantRequest, Granted, WriteReport))),
        absorbed=True,
    ),
    Scenario(
        5,
        "every message twice",
        lambda w: side_channel(w, *(Rule(kind, "twice") for kind in EVERY_KIND)),
        absorbed=True,
    ),
    Scenario(5, "all of prefill's messages of earlier requests replayed", replay_messages, absorbed=True),
    Scenario(
        5,
        "connections reset in the middle of messages",
        lambda w: side_channel(w, *(Rule(kind, "reset", times=2) for kind in EVERY_KIND[2:])),
        short=True,
        absorbed=True,
    ),
    Scenario(5, "side channel cut for 8 s", lambda w: break_side_channel(w, Fault(refuse=True))),
    Scenario(5, "side channel hangs for 8 s", lambda w: break_side_channel(w, Fault(stall=True))),
    # Mooncake.
    Scenario(6, "a batch fails once on each rank", lambda w: writes(w, "fail", times=1), short=True, absorbed=True),
    Scenario(6, "all batches fail", lambda w: writes(w, "fail")),
    Scenario(6, "batches fail whose bytes have arrived", lambda w: writes(w, "fail-after", times=3), absorbed=True),
    Scenario(
        6,
        "batches fail whose bytes arrive a second later",
        lambda w: writes(w, "fail-before", times=3, seconds=1.0),
        absorbed=True,
    ),
    Scenario(6, "two batches hang past their timeout", lambda w: writes(w, "hang", times=2, seconds=3.5)),
    Scenario(6, "all batches hang past their timeout", lambda w: writes(w, "hang", seconds=3.5)),
    Scenario(6, "Mooncake's queue of 128 descriptors, and a slow link", fill_queue, absorbed=True),
    Scenario(6, "connections of Mooncake reset after 200 kB each", reset_data),
    Scenario(6, "Mooncake's connections hang for 6 s", stall_data),
    Scenario(6, "decode unreachable for Mooncake for 4 s", cut_data),
    Scenario(6, "decode stopped for 6 s", stop_decode),
]
