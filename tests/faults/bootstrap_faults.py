# SPDX-License-Identifier: Apache-2.0
"""Faults of prefill's bootstrap server: decode asks it where tickets go, behind a router for Mooncake."""

from faults.process_faults import http
from faults.scenario import ROUTED_FOR_MOONCAKE, SOON_S, Scenario, adds_to, kill_holding
from faults.traffic import Answer
from faults.world import World
from harness.waiting import wait_until
from harness.wire import Fault, Rule
from vllm_ascend_pd.core.protocol import OfferTicket

SCENARIOS: list[Scenario] = []
scenario = adds_to(SCENARIOS)

# 10. Decode remembers the server's answer until a ticket gets none, so some tickets are lost here.

LOST_OFFERS = 4


def ask_bootstrap(world: World, fault: Fault, questions: int | None = None) -> list[Answer]:
    """`questions`: the fault ends once so many have met it."""
    requests = world.requests()
    asked = world.bootstrap.connections
    lost = Rule(OfferTicket, "lose", times=LOST_OFFERS)
    with world.tickets.ruled(lost):
        with world.bootstrap.broken(fault):
            volley = world.send(requests)
            if questions is None:
                volley.answers()
            else:
                wait_until(lambda: world.bootstrap.connections >= asked + questions, SOON_S)
        answers = volley.answers()
    assert lost.done == LOST_OFFERS
    assert world.bootstrap.connections > asked
    return answers


@scenario(10, "bootstrap server down", shape=ROUTED_FOR_MOONCAKE, reasonless=True)
def down(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(refuse=True))


@scenario(10, "bootstrap server hangs", shape=ROUTED_FOR_MOONCAKE, reasonless=True)
def hangs(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(stall=True))


@scenario(10, "bootstrap server hangs for two questions", shape=ROUTED_FOR_MOONCAKE, absorbed=True)
def hangs_briefly(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(stall=True), questions=2)


@scenario(10, "bootstrap server slow", shape=ROUTED_FOR_MOONCAKE, absorbed=True)
def slow(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(delay_s=0.4))


@scenario(10, "bootstrap server's answers cut off", shape=ROUTED_FOR_MOONCAKE, reasonless=True)
def cut_off(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(cut_after=100))


@scenario(10, "bootstrap server answers 500", shape=ROUTED_FOR_MOONCAKE, reasonless=True)
def answers_500(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(answer=http("500 Internal Server Error", "out of order")))


@scenario(10, "bootstrap server answers garbage", shape=ROUTED_FOR_MOONCAKE, reasonless=True)
def answers_garbage(world: World) -> list[Answer]:
    return ask_bootstrap(world, Fault(answer=http("200 OK", '{"0": {"engine_id": 7}}')))


@scenario(10, "prefill restarted, and the bootstrap server's answer is old", shape=ROUTED_FOR_MOONCAKE, reasonless=True)
def restart_prefill(world: World) -> list[Answer]:
    return kill_holding(world, world.prefill, world.tickets, OfferTicket)
