# SPDX-License-Identifier: Apache-2.0
"""Faults of processes: prefill, one of its ranks, decode, the metaserver or the proxy is killed, stopped or broken."""

import os
import signal
import time

from faults.scenario import Scenario, kill_holding, pushing, stopped
from faults.traffic import Answer
from faults.world import World
from harness.wire import Fault
from vllm_ascend_pd.core.protocol import GrantRequest, WriteReport


def kill_while_pushing(world: World) -> list[Answer]:
    with pushing(world) as volley:
        world.prefill.process.kill()
    answers = volley.answers()
    world.restart(world.prefill)
    return answers


def stop_prefill(world: World) -> list[Answer]:
    with pushing(world) as volley, stopped(world.prefill):
        return volley.answers()


def kill_a_rank(world: World) -> list[Answer]:
    server = world.prefill.process
    with pushing(world) as volley:
        server.note_shared_memory(server.members())
        os.kill(world.ranks(world.prefill)[1], signal.SIGKILL)
    answers = volley.answers()
    server.stop()  # vLLM ends the rest by itself, if slowly
    world.restart(world.prefill)
    return answers


def kill_decode(world: World) -> list[Answer]:
    with pushing(world) as volley:
        world.decode.process.kill()
        answers = volley.answers()
    answers += world.complete(2)
    world.restart(world.decode)
    return answers


def metaserver(world: World, fault: Fault) -> list[Answer]:
    requests = world.requests()
    with world.metaserver.broken(fault):
        return world.send(requests).answers()


def metaserver_away(world: World) -> list[Answer]:
    requests = world.requests()
    with world.metaserver.broken(Fault(refuse=True)):
        volley = world.send(requests)
        time.sleep(0.5)
    return volley.answers()


def kill_proxy(world: World) -> list[Answer]:
    with pushing(world) as volley:
        world.proxy.process.kill()
    answers = volley.answers()
    world.restart(world.proxy)
    return answers


def reset_proxy_connections(world: World) -> list[Answer]:
    with pushing(world) as volley:
        world.to_prefill.reset()
        time.sleep(0.2)
        world.to_decode.reset()
    return volley.answers()


SCENARIOS = [
    # Prefill is killed, or stands still.
    Scenario(1, "prefill killed before the grant", lambda w: kill_holding(w, w.prefill, w.channel, GrantRequest)),
    Scenario(1, "prefill killed while it pushes layers", kill_while_pushing),
    Scenario(
        1, "prefill killed before its final reports", lambda w: kill_holding(w, w.prefill, w.channel, WriteReport)
    ),
    Scenario(1, "prefill stopped while it pushes, goes on after decode's deadline", stop_prefill),
    # One rank of several.
    Scenario(2, "one of prefill's two ranks killed", kill_a_rank),
    # Decode is killed. In the short form of all tests, tests/e2e/test_retry.py kills a decode engine.
    Scenario(3, "decode killed and restarted at the same port", kill_decode),
    # The metaserver and the proxy.
    Scenario(4, "metaserver down", lambda w: metaserver(w, Fault(refuse=True))),
    Scenario(4, "metaserver down for half a second", metaserver_away, absorbed=True),
    Scenario(4, "metaserver hangs", lambda w: metaserver(w, Fault(stall=True))),
    Scenario(4, "proxy killed and restarted", kill_proxy, disconnects=True),
    Scenario(4, "connections of the proxy to both engines reset", reset_proxy_connections, short=True),
]
