# SPDX-License-Identifier: Apache-2.0
"""Faults of processes: prefill, one of its ranks, decode, the metaserver or the proxy is killed, stopped or broken."""

import os
import signal
import time

from faults.scenario import SLOW_S, Scenario, adds_to, kill_holding, pushing
from faults.traffic import Answer
from faults.world import World
from harness.wire import Fault
from vllm_ascend_pd.core.protocol import GrantRequest, WriteReport

SCENARIOS: list[Scenario] = []
scenario = adds_to(SCENARIOS)


# 1. Prefill is killed, or stands still.


@scenario(1, "prefill killed before the grant")
def kill_before_grant(world: World) -> list[Answer]:
    return kill_holding(world, world.prefill, world.channel, GrantRequest)


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
    return kill_holding(world, world.prefill, world.channel, WriteReport)


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
        server = world.prefill.process
        server.note_shared_memory(server.members())
        os.kill(world.ranks(world.prefill)[1], signal.SIGKILL)
    answers = volley.answers()
    server.stop()  # vLLM ends the rest by itself, if slowly
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


@scenario(4, "metaserver hangs")
def metaserver_hangs(world: World) -> list[Answer]:
    return metaserver(world, Fault(stall=True))


@scenario(4, "proxy killed and restarted", disconnects=True)
def kill_proxy(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.proxy.process.kill()
    answers = volley.answers()
    world.restart(world.proxy)
    return answers


@scenario(4, "connections of the proxy to both engines reset", short=True)
def reset_proxy_connections(world: World) -> list[Answer]:
    with world.writes("slow", seconds=SLOW_S):
        volley = pushing(world)
        world.to_prefill.reset()
        time.sleep(0.2)
        world.to_decode.reset()
    return volley.answers()
