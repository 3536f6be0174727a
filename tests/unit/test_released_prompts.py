# SPDX-License-Identifier: Apache-2.0
"""Prompts that a router asked prefill for first, and for which decode says that no ticket will come."""

from harness.held_prompts import *  # noqa: F403
from harness.held_prompts import (
    OTHER,
    PREFILL_FIRST,
    PROMPT,
    Prefill,
    refused,
    remembered_of,
    ticket_for,
)
from harness.real_scheduler import *  # noqa: F403
from vllm_ascend_pd.core.protocol import Acknowledged, TicketTaken
from vllm_ascend_pd.prefill import held_prompts
from vllm_ascend_pd.prefill.ticket_listener import NO_PROMPT


def test_decode_computes_the_prompt_itself(prefill: Prefill) -> None:
    transfer_id = prefill.answered("r")["transfer_id"]
    released = ticket_for(PROMPT)
    assert prefill.ask(prefill.release_of(transfer_id, released)) == Acknowledged()
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})
    assert prefill.free == prefill.all_free
    prefill.offer(transfer_id, released)
    assert prefill.run()[0].tickets == {}
    assert prefill.fate(transfer_id, released).retry, "it is over"
    another = ticket_for(PROMPT)
    prefill.offer(transfer_id, another)
    prefill.run()
    assert prefill.fate(transfer_id, another) == TicketTaken(), "one request may have several prompts"
    prefill.wait_for_prompts()
    assert refused(prefill, transfer_id, another) == NO_PROMPT


def test_decode_computes_one_of_several_prompts(prefill: Prefill) -> None:
    """Its message may come twice, or before that prompt: no other prompt of the same request is freed."""
    transfer_id = prefill.answered("cmpl-x-0-01234567")["transfer_id"]
    release = prefill.release_of(transfer_id, ticket_for(OTHER))
    assert prefill.ask(release) == Acknowledged()
    assert prefill.run()[0].unsent == set(), "the prompt that is there is another one"
    assert prefill.answered("cmpl-x-1-01234568", OTHER)["error"] == "decode computes it"
    prefill.answered("cmpl-x-2-01234569", OTHER)
    assert prefill.ask(release) == Acknowledged()
    assert prefill.run()[0].unsent == set(), "the message was for an earlier prompt"
    tickets = [ticket_for(PROMPT), ticket_for(OTHER)]
    for ticket in tickets:
        prefill.offer(transfer_id, ticket)
    assert prefill.run()[0].tickets == dict(zip(["cmpl-x-0-01234567", "cmpl-x-2-01234569"], tickets, strict=True))


def test_decode_computes_one_of_several_equal_prompts(prefill: Prefill) -> None:
    """Whichever of them is freed, the ticket for the other is served when that comes."""
    transfer_id = prefill.answered("0_cmpl-x-0-01234567")["transfer_id"]
    prefill.ask(prefill.release_of(transfer_id, ticket_for(PROMPT)))
    ticket = ticket_for(PROMPT)
    prefill.offer(transfer_id, ticket)
    assert prefill.run()[0].unsent == {"0_cmpl-x-0-01234567"}
    assert prefill.fate(transfer_id, ticket) == TicketTaken()
    prefill.add("1_cmpl-x-0-01234568", PROMPT, PREFILL_FIRST)
    assert prefill.run()[0].tickets == {"1_cmpl-x-0-01234568": ticket}


def test_a_release_before_its_prompt_is_forgotten_in_time(prefill: Prefill) -> None:
    prefill.ask(prefill.release_of("xfer-1", ticket_for(PROMPT)))
    prefill.run()
    prefill.clock.now += held_prompts.EARLY_S
    params = {**PREFILL_FIRST, "transfer_id": "xfer-1"}
    assert prefill.answered("r", params=params)["transfer_id"] == "xfer-1"


def test_a_prompt_that_decode_has_with_other_tokens_is_freed(prefill: Prefill) -> None:
    """No ticket fits, so decode releases it, by its own tokens."""
    transfer_id = prefill.answered("r")["transfer_id"]
    misfit = ticket_for(OTHER)
    prefill.offer(transfer_id, misfit)
    prefill.run()
    prefill.wait_for_prompts()
    assert "tokens differ" in refused(prefill, transfer_id, misfit)
    prefill.ask(prefill.release_of(transfer_id, misfit))
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})
    assert remembered_of(prefill) == {}


def test_a_prompt_that_decode_computes_with_other_tokens_is_freed(prefill: Prefill) -> None:
    """Another prompt of the same request might be meant, which is still to come."""
    transfer_id = prefill.answered("r")["transfer_id"]
    prefill.ask(prefill.release_of(transfer_id, ticket_for(OTHER)))
    assert prefill.run()[0].unsent == set()
    prefill.clock.now += held_prompts.EARLY_S
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})
    assert remembered_of(prefill) == {}


def test_a_request_with_the_transfer_id_of_one_that_is_over(prefill: Prefill) -> None:
    """The ticket that came for the first one's sibling was refused: its release is not for what comes later."""
    params = {**PREFILL_FIRST, "transfer_id": "xfer-1"}
    prefill.answered("r", params=params)
    tickets = [ticket_for(PROMPT), ticket_for(PROMPT)]
    for ticket in tickets:
        prefill.offer("xfer-1", ticket)
    prefill.run()
    prefill.run(sent={"r"})
    prefill.wait_for_prompts()
    assert refused(prefill, "xfer-1", tickets[1]) == NO_PROMPT
    prefill.ask(prefill.release_of("xfer-1", tickets[1]))
    prefill.run()
    assert prefill.answered("again", params=params)["transfer_id"] == "xfer-1"


def test_a_ticket_that_waits_when_the_engine_has_no_more_work_is_refused(prefill: Prefill) -> None:
    """vLLM makes no steps without requests: the listener looks at the clock when decode asks."""
    transfer_id = prefill.answered("r")["transfer_id"]
    ticket = ticket_for(OTHER)
    prefill.offer(transfer_id, ticket)
    prefill.run()
    prefill.ask(prefill.release_of(transfer_id, ticket_for(PROMPT)))
    prefill.run()
    prefill.run(sent={"r"})
    assert not prefill.vllm.has_requests()
    prefill.clock.now += held_prompts.EARLY_S
    assert "tokens differ" in refused(prefill, transfer_id, ticket)


def test_the_release_of_a_served_ticket_frees_no_other_prompt(prefill: Prefill) -> None:
    transfer_id = prefill.answered("cmpl-x-0-01234567")["transfer_id"]
    prefill.answered("cmpl-x-1-01234568")
    served, other = ticket_for(PROMPT), ticket_for(PROMPT)
    prefill.offer(transfer_id, served)
    prefill.run()
    prefill.ask(prefill.release_of(transfer_id, served))
    assert prefill.run()[0].unsent == set()
    prefill.offer(transfer_id, other)
    assert prefill.run()[0].tickets == {"cmpl-x-1-01234568": other}


def test_decode_gives_up_before_prefill_knows_the_prompt(prefill: Prefill) -> None:
    ticket = ticket_for(PROMPT)
    prefill.offer("xfer-1", ticket)
    prefill.ask(prefill.release_of("xfer-1", ticket, "the client left"))
    prefill.run()
    assert prefill.fate("xfer-1", ticket).retry, "it is over"
    assert prefill.answered("r", params={**PREFILL_FIRST, "transfer_id": "xfer-1"})["error"] == "the client left"
    assert prefill.free == prefill.all_free
    assert prefill.answered("again", params={**PREFILL_FIRST, "transfer_id": "xfer-1"})["transfer_id"] == "xfer-1"
