# SPDX-License-Identifier: Apache-2.0
"""Faults behind a router that asks prefill first: messages about tickets are lost, late or repeated, and an engine or
the router ends in between."""

from faults.request_faults import leave_at_every_stage
from faults.scenario import ROUTED, SOON_S, Scenario, adds_to
from faults.traffic import Answer
from faults.world import World, blocks_in_use
from harness.waiting import wait_until
from harness.wire import Fault, Rule
from vllm_ascend_pd.core.protocol import Acknowledged, AskTicket, GrantRequest, OfferTicket, ReleasePrompt, TicketTaken

SCENARIOS: list[Scenario] = []
scenario = adds_to(SCENARIOS)

# 10. Tickets that decode hands straight to prefill.

EVERY_KIND = (OfferTicket, TicketTaken, AskTicket)


def about_tickets(world: World, *rules: Rule) -> list[Answer]:
    requests = world.requests()
    with world.tickets.ruled(*rules):
        return world.send(requests).answers()


@scenario(10, "messages about tickets lost: the first two of each kind", shape=ROUTED, short=True, absorbed=True)
def lose_messages(world: World) -> list[Answer]:
    rules = [Rule(kind, "lose", times=2) for kind in EVERY_KIND]
    answers = about_tickets(world, *rules)
    assert rules[0].done == 2
    return answers


@scenario(10, "all tickets lost", shape=ROUTED, reasonless=True)
def lose_offers(world: World) -> list[Answer]:
    return about_tickets(world, Rule(OfferTicket, "lose"))


@scenario(10, "all answers to tickets lost", shape=ROUTED, reasonless=True)
def lose_answers(world: World) -> list[Answer]:
    return about_tickets(world, Rule(TicketTaken, "lose"))


@scenario(10, "tickets delayed by 0.4 s, overtaken by others", shape=ROUTED, absorbed=True)
def delay_offers(world: World) -> list[Answer]:
    return about_tickets(world, Rule(OfferTicket, "late", seconds=0.4), Rule(TicketTaken, "late", seconds=0.4))


@scenario(10, "every message about tickets twice", shape=ROUTED, absorbed=True)
def repeat_messages(world: World) -> list[Answer]:
    return about_tickets(world, *(Rule(kind, "twice") for kind in EVERY_KIND))


@scenario(10, "clients of a router leave at every stage", shape=ROUTED, short=True, reasonless=True)
def leave(world: World) -> list[Answer]:
    return leave_at_every_stage(world)


@scenario(10, "clients of a router leave, and prefill is not told", shape=ROUTED, reasonless=True)
def leave_untold(world: World) -> list[Answer]:
    with world.tickets.ruled(Rule(ReleasePrompt, "lose"), Rule(Acknowledged, "lose")):
        return leave_at_every_stage(world)


@scenario(10, "prefill killed before it gets a ticket", shape=ROUTED, reasonless=True)
def kill_prefill_before(world: World) -> list[Answer]:
    requests = world.requests()
    with world.tickets.ruled(Rule(OfferTicket, "hold")):
        volley = world.send(requests)
        wait_until(lambda: len(world.tickets.held) >= 2, SOON_S)
        world.prefill.process.kill()
    answers = volley.answers()
    world.restart(world.prefill)
    return answers


@scenario(10, "prefill killed after it took tickets", shape=ROUTED, reasonless=True)
def kill_prefill_after(world: World) -> list[Answer]:
    requests = world.requests()
    with world.channel.ruled(Rule(GrantRequest, "hold")):
        volley = world.send(requests)
        wait_until(lambda: len(world.channel.held) >= 2, SOON_S)
        world.prefill.process.kill()
    answers = volley.answers()
    world.restart(world.prefill)
    return answers


@scenario(10, "decode killed after prefill has computed", shape=ROUTED, reasonless=True, disconnects=True)
def kill_decode(world: World) -> list[Answer]:
    requests = world.requests()
    with world.tickets.ruled(Rule(OfferTicket, "hold")):
        volley = world.send(requests)
        wait_until(lambda: len(world.tickets.held) >= 4, SOON_S)
        world.decode.process.kill()
    answers = volley.answers()
    world.restart(world.decode)
    return answers


@scenario(10, "the router killed between its two requests", shape=ROUTED, disconnects=True, short=True)
def kill_router(world: World) -> list[Answer]:
    assert world.router is not None
    requests = world.requests(4)
    with world.to_decode.broken(Fault(stall=True)):
        volley = world.send(requests)
        wait_until(lambda: blocks_in_use(world.prefill) > 4 and world.running(world.prefill) == 0, SOON_S)
        world.router.process.kill()
        answers = volley.answers()
    world.restart(world.router)
    return answers
