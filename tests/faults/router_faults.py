# SPDX-License-Identifier: Apache-2.0
"""Faults behind a router that asks prefill first: messages about tickets are lost, late or repeated, and an engine or
the router ends in between."""

from faults.request_faults import leave_at_every_stage
from faults.scenario import ROUTED, SOON_S, Scenario, adds_to, kill_holding
from faults.traffic import Answer
from faults.world import World, blocks_in_use, leave
from harness.client import at_once
from harness.waiting import wait_until
from harness.wire import Fault, Rule
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    AskTicket,
    GrantRequest,
    OfferTicket,
    ReleasePrompt,
    TicketTaken,
)

SCENARIOS: list[Scenario] = []
scenario = adds_to(SCENARIOS)

# 10. Tickets that decode hands straight to prefill.

EVERY_KIND = (OfferTicket, TicketTaken, AskTicket)
LOST_GRANTS = 48
"""So many requests for grants are lost where decode has to ask about tickets: it asks after 2 s without KV."""
PATIENCE_S = 6.0
"""So long clients wait whose tickets are on their way. Prefill has computed their prompts by then."""


def about_tickets(world: World, *rules: Rule) -> list[Answer]:
    requests = world.requests()
    asked = any(rule.kind is AskTicket for rule in rules)
    slow = [Rule(GrantRequest, "lose", times=LOST_GRANTS)] if asked else []
    with world.channel.ruled(*slow), world.tickets.ruled(*rules):
        answers = world.send(requests).answers()
    assert all(rule.done >= (rule.times or 1) for rule in rules), rules
    return answers


def leave_while_offered(world: World, *rules: Rule) -> list[Answer]:
    """Tickets arrive only after their clients have left, and decode has released their prompts."""
    stay, going = world.requests(8), [request for request, _ in world.requests(8)]
    released = world.tickets.seen[ReleasePrompt.__name__]
    with world.tickets.ruled(Rule(OfferTicket, "hold"), *rules):
        volley = world.send(stay)
        left = at_once(lambda request: leave(world, request, PATIENCE_S), going, len(going))
        wait_until(lambda: world.tickets.seen[ReleasePrompt.__name__] > released, SOON_S)
    return left + volley.answers()


@scenario(10, "messages about tickets lost: the first two of each kind", shape=ROUTED, absorbed=True)
def lose_messages(world: World) -> list[Answer]:
    return about_tickets(world, *(Rule(kind, "lose", times=2) for kind in EVERY_KIND))


@scenario(10, "all tickets lost", shape=ROUTED, reasonless=True)
def lose_offers(world: World) -> list[Answer]:
    return about_tickets(world, Rule(OfferTicket, "lose"))


@scenario(10, "all answers to tickets lost", shape=ROUTED, reasonless=True)
def lose_answers(world: World) -> list[Answer]:
    return about_tickets(world, Rule(TicketTaken, "lose"))


@scenario(10, "tickets delayed by 0.4 s, overtaken by others", shape=ROUTED, absorbed=True)
def delay_offers(world: World) -> list[Answer]:
    return about_tickets(world, Rule(OfferTicket, "late", seconds=0.4), Rule(TicketTaken, "late", seconds=0.4))


@scenario(10, "questions about tickets delayed by 0.4 s", shape=ROUTED, absorbed=True)
def delay_questions(world: World) -> list[Answer]:
    return about_tickets(world, Rule(AskTicket, "late", seconds=0.4))


@scenario(10, "every message about tickets twice", shape=ROUTED, short=True, absorbed=True)
def repeat_messages(world: World) -> list[Answer]:
    return about_tickets(world, *(Rule(kind, "twice") for kind in EVERY_KIND))


@scenario(10, "clients of a router leave at every stage", shape=ROUTED, short=True, reasonless=True)
def leave_at_any_time(world: World) -> list[Answer]:
    return leave_at_every_stage(world)


@scenario(10, "clients of a router leave, and prefill is not told", shape=ROUTED, reasonless=True)
def leave_untold(world: World) -> list[Answer]:
    return leave_while_offered(world, Rule(ReleasePrompt, "lose"), Rule(Acknowledged, "lose"))


@scenario(10, "clients of a router leave, and prefill is told before it gets the ticket", shape=ROUTED, reasonless=True)
def leave_told_early(world: World) -> list[Answer]:
    return leave_while_offered(world)


@scenario(10, "prefill killed before it gets a ticket", shape=ROUTED, reasonless=True)
def kill_prefill_before(world: World) -> list[Answer]:
    return kill_holding(world, world.prefill, world.tickets, OfferTicket)


@scenario(10, "prefill killed after it took tickets", shape=ROUTED, reasonless=True)
def kill_prefill_after(world: World) -> list[Answer]:
    return kill_holding(world, world.prefill, world.channel, GrantRequest)


@scenario(10, "decode killed after prefill has computed", shape=ROUTED, reasonless=True, disconnects=True)
def kill_decode(world: World) -> list[Answer]:
    return kill_holding(world, world.decode, world.tickets, OfferTicket, held=4)


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
