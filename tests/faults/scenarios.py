# SPDX-License-Identifier: Apache-2.0
"""What is broken, when, and what may become of the requests in flight."""

import dataclasses
import os
import random
import re
import signal
import time
from collections.abc import Callable

from faults.traffic import Answer, Volley
from faults.world import DECODE, PREFILL, Shape, World, leave
from harness.client import at_once
from harness.models import TINY
from harness.waiting import wait_until
from harness.wire import Fault, Rule
from vllm_ascend_pd.core.protocol import Acknowledged, Describe, EngineDescription, Granted, GrantRequest, WriteReport

SOON_S = 60.0
"""Within which something that must happen does."""
SLOW_S = 0.15
"""A batch then takes so much longer: there is a middle to interrupt."""

BLOCK_BYTES = 128 * TINY.kv_bytes_per_token
FAIL = Shape(
    "TP 2 to TP 1, `kv_load_failure_policy` fail", decode=dataclasses.replace(DECODE, load_failure_policy="fail")
)
RECOMPUTE = Shape(
    "TP 2 to TP 1, `kv_load_failure_policy` recompute",
    decode=dataclasses.replace(DECODE, load_failure_policy="recompute"),
)
FEW_BLOCKS = Shape(
    "TP 2 to TP 1, 14 blocks each",
    # Per rank: prefill's two have half of the heads each.
    prefill=dataclasses.replace(PREFILL, kv_cache_bytes=14 * BLOCK_BYTES // 2, max_model_len=1500),
    decode=dataclasses.replace(DECODE, kv_cache_bytes=14 * BLOCK_BYTES, max_model_len=1500),
    longest=1450,
)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`number`: in the list of what must be survived; `run`: breaks things and mends them again, and returns how the
    requests ended that were in flight."""

    number: int
    name: str
    run: Callable[[World], list[Answer]]
    shape: Shape = FAIL
    short: bool = False
    absorbed: bool = False
    """All answers are right: nobody notices."""
    disconnects: bool = False
    """Clients may see their connections break."""

    def __str__(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


SCENARIOS: list[Scenario] = []

Run = Callable[[World], list[Answer]]


def scenario(number: int, name: str, **options: object) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        SCENARIOS.append(Scenario(number, name, run, **options))  # type: ignore[arg-type]
        return run

    return add


def pushing(world: World, requests: int = 12) -> Volley:
    """Requests in flight, of which prefill is writing some: batches have been written, more are to come."""
    before = sum(world.tell(world.prefill, "batches"))
    volley = world.send(world.requests(requests))
    wait_until(lambda: sum(world.tell(world.prefill, "batches")) > before + 2, SOON_S)
    assert volley.in_flight >= 8
    return volley


# 1. Prefill is killed, or stands still.


def kill_prefill_holding(world: World, kind: type[GrantRequest | WriteReport]) -> list[Answer]:
    requests = world.requests()
    with world.channel.ruled(Rule(kind, "hold")):
        volley = world.send(requests)
        wait_until(lambda: len(world.channel.held) >= 2, SOON_S)
        assert volley.in_flight >= 8
        world.prefill.process.kill()
    answers = volley.answers()
    world.restart(world.prefill)
    return answers


@scenario(1, "prefill killed before the grant")
def kill_before_grant(world: World) -> list[Answer]:
    return kill_prefill_holding(world, GrantRequest)


@scenario(1, "prefill killed while it pushes layers")
def kill_while_pushing(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.prefill.process.kill()
    answers = volley.answers()
    world.restart(world.prefill)
    return answers


@scenario(1, "prefill killed before its final reports")
def kill_before_report(world: World) -> list[Answer]:
    return kill_prefill_holding(world, WriteReport)


@scenario(1, "prefill stopped while it pushes, goes on after decode's deadline")
def stop_prefill(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.prefill.process.signal_group(signal.SIGSTOP)
        try:
            return volley.answers()
        finally:
            world.prefill.process.signal_group(signal.SIGCONT)


# 2. One rank of several.


@scenario(2, "one of prefill's two ranks killed")
def kill_a_rank(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        os.kill(world.ranks(world.prefill)[1], signal.SIGKILL)
    answers = volley.answers()
    world.prefill.process.stop()  # vLLM ends the rest by itself, if slowly
    world.restart(world.prefill)
    return answers


# 3. Decode is killed.


@scenario(3, "decode killed and restarted at the same port")
def kill_decode(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.decode.process.kill()
        answers = volley.answers()
    answers += world.complete(2)
    world.restart(world.decode)
    return answers


# 4. The metaserver and the proxy.


def metaserver(world: World, fault: Fault) -> list[Answer]:
    requests = world.requests()
    with world.metaserver.broken(fault):
        return world.send(requests).answers()


def http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@scenario(4, "metaserver down")
def metaserver_down(world: World) -> list[Answer]:
    return metaserver(world, Fault(refuse=True))


@scenario(4, "metaserver down for half a second", absorbed=True)
def metaserver_away(world: World) -> list[Answer]:
    requests = world.requests()
    world.metaserver.set(Fault(refuse=True))
    volley = world.send(requests)
    time.sleep(0.5)
    world.metaserver.set(Fault())
    return volley.answers()


@scenario(4, "metaserver slow", absorbed=True)
def metaserver_slow(world: World) -> list[Answer]:
    return metaserver(world, Fault(delay_s=0.5))


@scenario(4, "metaserver hangs")
def metaserver_hangs(world: World) -> list[Answer]:
    return metaserver(world, Fault(stall=True))


@scenario(4, "metaserver answers 500", short=True)
def metaserver_errors(world: World) -> list[Answer]:
    return metaserver(world, Fault(answer=http("500 Internal Server Error", "broken by the test")))


@scenario(4, "metaserver answers 404")
def metaserver_does_not_know(world: World) -> list[Answer]:
    return metaserver(world, Fault(answer=http("404 Not Found", '{"error": "who?"}')))


@scenario(4, "metaserver answers garbage")
def metaserver_babbles(world: World) -> list[Answer]:
    return metaserver(world, Fault(answer=b"\x00\xff not HTTP at all\r\n\r\n"))


@scenario(4, "proxy killed and restarted", disconnects=True)
def kill_proxy(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.proxy.process.kill()
    answers = volley.answers()
    world.restart(world.proxy)
    return answers


@scenario(4, "connections of the proxy to both engines reset")
def reset_proxy_connections(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.to_prefill.reset()
        time.sleep(0.2)
        world.to_decode.reset()
    return volley.answers()


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


@scenario(6, "all batches fail", short=True)
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
    """The suite's queue is always so short. None may be refused there, in no fault before this one either: Mooncake
    might stop for good, see `transport/peer_queue.py`."""
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


# 7. Clients that leave.


@scenario(7, "clients leave at every stage", short=True)
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
