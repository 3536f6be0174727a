# SPDX-License-Identifier: Apache-2.0
"""Faults of transfers: messages of the side channel or Mooncake's writes are lost, delayed, repeated, or fail."""

import signal
import time

from faults.scenario import SLOW_S, Scenario, adds_to, pushing
from faults.traffic import Answer
from faults.world import World
from harness.wire import Fault, Rule
from vllm_ascend_pd.core.protocol import Acknowledged, Describe, EngineDescription, Granted, GrantRequest, WriteReport

SCENARIOS: list[Scenario] = []
scenario = adds_to(SCENARIOS)


# 5. The side channel.

EVERY_KIND = (Describe, EngineDescription, GrantRequest, Granted, WriteReport, Acknowledged)


def side_channel(world: World, *rules: Rule) -> list[Answer]:
    requests = world.requests()
    with world.channel.ruled(*rules):
        answers = world.send(requests).answers()
    assert all(rule.done for rule in rules if rule.kind not in (Describe, EngineDescription))
    return answers


@scenario(5, "messages lost: the first two of each kind", short=True, absorbed=True)
def lose_messages(world: World) -> list[Answer]:
    return side_channel(world, *(Rule(kind, "lose", times=2) for kind in EVERY_KIND))


@scenario(5, "all reports lost")
def lose_reports(world: World) -> list[Answer]:
    return side_channel(world, Rule(WriteReport, "lose"))


@scenario(5, "all grants lost")
def lose_grants(world: World) -> list[Answer]:
    return side_channel(world, Rule(Granted, "lose"))


@scenario(5, "messages delayed by 0.4 s, overtaken by others", absorbed=True)
def delay_messages(world: World) -> list[Answer]:
    return side_channel(world, *(Rule(kind, "late", seconds=0.4) for kind in (GrantRequest, Granted, WriteReport)))


@scenario(5, "every message twice", short=True, absorbed=True)
def repeat_messages(world: World) -> list[Answer]:
    return side_channel(world, *(Rule(kind, "twice") for kind in EVERY_KIND))


@scenario(5, "all of prefill's messages of earlier requests replayed", absorbed=True)
def replay_messages(world: World) -> list[Answer]:
    world.channel.record()
    answers = world.complete(8)
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        assert world.channel.replay() >= 16
    return answers + volley.answers()


@scenario(5, "connections reset in the middle of messages", short=True, absorbed=True)
def reset_in_messages(world: World) -> list[Answer]:
    return side_channel(
        world, *(Rule(kind, "reset", times=2) for kind in (GrantRequest, Granted, WriteReport, Acknowledged))
    )


@scenario(5, "side channel cut for 8 s")
def cut_side_channel(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        with world.channel.broken(Fault(refuse=True)):
            time.sleep(8)
    return volley.answers()


@scenario(5, "side channel hangs for 8 s")
def stall_side_channel(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        with world.channel.broken(Fault(stall=True)):
            time.sleep(8)
    return volley.answers()


# 6. Mooncake.


def writes(world: World, fault: str, times: int | None = None, seconds: float = 0.0) -> list[Answer]:
    requests = world.requests()
    with world.writes(fault, times, seconds):
        return world.send(requests).answers()


@scenario(6, "a batch fails once on each rank", short=True, absorbed=True)
def fail_once(world: World) -> list[Answer]:
    return writes(world, "fail", times=1)


@scenario(6, "all batches fail")
def fail_always(world: World) -> list[Answer]:
    return writes(world, "fail")


@scenario(6, "batches fail whose bytes have arrived", absorbed=True)
def fail_after_arrival(world: World) -> list[Answer]:
    return writes(world, "fail-after", times=3)


@scenario(6, "batches fail whose bytes arrive a second later", absorbed=True)
def fail_before_arrival(world: World) -> list[Answer]:
    return writes(world, "fail-before", times=3, seconds=1.0)


@scenario(6, "two batches hang past their timeout")
def hang(world: World) -> list[Answer]:
    return writes(world, "hang", times=2, seconds=3.5)


@scenario(6, "all batches hang past their timeout")
def hang_always(world: World) -> list[Answer]:
    return writes(world, "hang", seconds=3.5)


@scenario(6, "Mooncake's queue of 128 descriptors, and a slow link", absorbed=True)
def fill_queue(world: World) -> list[Answer]:
    """Fills Mooncake's queue, which is short in this suite. No descriptor may be refused, not in earlier faults either,
    because that might stop Mooncake for good (`transport/tcp.py`).
    """
    requests = world.requests()
    with world.sessions.data.broken(Fault(delay_s=0.005)):
        answers = world.send(requests).answers()
    assert "queue-full" not in world.prefill.log.read_text(errors="replace")
    return answers


@scenario(6, "connections of Mooncake reset after 200 kB each")
def reset_data(world: World) -> list[Answer]:
    requests = world.requests()
    before = world.sessions.data.connections
    with world.sessions.data.broken(Fault(cut_after=200_000)):
        world.sessions.data.reset()
        volley = world.send(requests)
        time.sleep(4)
    assert world.sessions.data.connections > before
    return volley.answers()


@scenario(6, "Mooncake's connections hang for 6 s")
def stall_data(world: World) -> list[Answer]:
    requests = world.requests()
    with world.sessions.data.broken(Fault(stall=True)):
        volley = world.send(requests)
        time.sleep(6)
    return volley.answers()


@scenario(6, "decode unreachable for Mooncake for 4 s")
def cut_data(world: World) -> list[Answer]:
    requests = world.requests()
    with world.sessions.broken(Fault(refuse=True)), world.sessions.data.broken(Fault(refuse=True)):
        volley = world.send(requests)
        time.sleep(4)
    return volley.answers()


@scenario(6, "decode stopped for 6 s")
def stop_decode(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.decode.process.signal_group(signal.SIGSTOP)
        try:
            time.sleep(6)
        finally:
            world.decode.process.signal_group(signal.SIGCONT)
        return volley.answers()
