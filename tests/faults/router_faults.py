# SPDX-License-Identifier: Apache-2.0
"""Faults behind a router that asks prefill first: messages about tickets are lost, late or repeated, and an engine or
the router ends in between."""

from collections.abc import Callable

from faults.request_faults import leave_at_every_stage
from faults.scenario import ROUTED, SOON_S, Scenario, kill_holding
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


def scenario(name: str, run: Callable[[World], list[Answer]], **options: bool) -> Scenario:
    """About tickets that decode hands straight to prefill. Without `absorbed`, clients may get no reason."""
    return Scenario(10, name, run, ROUTED, reasonless=not options.get("absorbed"), **options)


SCENARIOS = [
    scenario(
        "messages about tickets lost: the first two of each kind",
        lambda w: about_tickets(w, *(Rule(kind, "lose", times=2) for kind in EVERY_KIND)),
        absorbed=True,
    ),
    scenario("all tickets lost", lambda w: about_tickets(w, Rule(OfferTicket, "lose"))),
    scenario("all answers to tickets lost", lambda w: about_tickets(w, Rule(TicketTaken, "lose"))),
    scenario(
        "tickets delayed by 0.4 s, overtaken by others",
        lambda w: about_tickets(w, *(Rule(kind, "late", seconds=0.4) for kind in (OfferTicket, TicketTaken))),
        absorbed=True,
    ),
    scenario(
        "questions about tickets delayed by 0.4 s",
        lambda w: about_tickets(w, Rule(AskTicket, "late", seconds=0.4)),
        absorbed=True,
    ),
    scenario(
        "every message about tickets twice",
        lambda w: about_tickets(w, *(Rule(kind, "twice") for kind in EVERY_KIND)),
        absorbed=True,
    ),
    scenario("clients of a router leave at every stage", leave_at_every_stage),
    scenario(
        "clients of a router leave, and prefill is not told",
        lambda w: leave_while_offered(w, Rule(ReleasePrompt, "lose"), Rule(Acknowledged, "lose")),
    ),
    scenario("clients of a router leave, and prefill is told before it gets the ticket", leave_while_offered),
    scenario("prefill killed before it gets a ticket", lambda w: kill_holding(w, w.prefill, w.tickets, OfferTicket)),
    scenario("prefill killed after it took tickets", lambda w: kill_holding(w, w.prefill, w.channel, GrantRequest)),
    scenario(
        "decode killed after prefill has computed",
        lambda w: kill_holding(w, w.decode, w.tickets, OfferTicket, held=4),
        disconnects=True,
    ),
    scenario("the router killed between its two requests", kill_router, disconnects=True),
]
