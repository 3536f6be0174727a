# SPDX-License-Identifier: Apache-2.0
"""Prefill's listener for tickets: what it answers at once, and what it keeps of strangers' messages."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from harness.held_prompts import until
from harness.tickets import ticket_with
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    AskTicket,
    OfferTicket,
    ReleasePrompt,
    TicketRefused,
    TicketTaken,
)
from vllm_ascend_pd.core.ticket import Secret, Ticket, signed
from vllm_ascend_pd.prefill import ticket_listener
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.prefill.ticket_listener import Fate, TicketListener
from vllm_ascend_pd.transport.side_channel import SideChannelClient

ENGINE = "prefill-0-1"


@pytest.fixture
def listener() -> Iterator[TicketListener]:
    made = TicketListener(ENGINE, "127.0.0.1", 0)
    yield made
    made.close(5.0)


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    made = SideChannelClient()
    yield made
    made.close()


@pytest.fixture
def ask(listener: TicketListener, client: SideChannelClient) -> Callable[[Any], Any]:
    return lambda message: answer_of(listener, client, message)


def answer_of(listener: TicketListener, client: SideChannelClient, message: Any) -> Any:
    answers: list[Any] = []
    client.request(listener.endpoint, message, 10.0, answers.append)
    return until(lambda: answers and answers[0])


def ticket(blocks: int = 3) -> Ticket:
    return ticket_with(
        request_id="d",
        remote_block_ids=[list(range(1, blocks + 1))],
        ticket_id=secrets.token_hex(16),
        num_tokens=16 * blocks,
    )


def offer(of: Ticket) -> OfferTicket:
    return OfferTicket(ENGINE, "xfer-1", of)


def fate(of: Ticket) -> AskTicket:
    return AskTicket(ENGINE, "xfer-1", of.ticket_id)


def messages(listener: TicketListener) -> list[Any]:
    """What waits for the scheduler."""
    with listener.waiting() as waiting:
        return [each.message for each in waiting]


def settle(listener: TicketListener, fate: Fate, reason: str = "", most: int | None = None) -> None:
    """What the scheduler says of the tickets that wait."""
    with listener.waiting() as waiting:
        for each in waiting[:most]:
            listener.settle(each, fate, reason)


def test_a_tickets_life(listener, ask):
    one = ticket()
    assert ask(fate(one)) == TicketRefused("the ticket is not known here", retry=True)
    assert [ask(offer(one)) for _ in range(2)] == [TicketTaken(), TicketTaken()]
    assert messages(listener) == [offer(one)]
    settle(listener, Fate.SERVED)
    assert [ask(offer(one)), ask(fate(one))] == [TicketTaken(), TicketTaken()]
    assert ask(ReleasePrompt(ENGINE, "xfer-1", "the client left", one.ticket_id, 48)) == Acknowledged()
    assert messages(listener) == []
    listener.ended(one.ticket_id)
    assert ask(fate(one)).retry
    assert ask(offer(one)) == TicketTaken(), "that decode offers it again has no effect"
    assert messages(listener) == []


def test_a_ticket_that_is_refused_and_then_released(listener, ask):
    one = ticket()
    ask(offer(one))
    settle(listener, Fate.REFUSED, "it is for another prompt")
    assert ask(fate(one)) == ask(offer(one)) == TicketRefused("it is for another prompt", retry=False)
    assert messages(listener) == []
    release = ReleasePrompt(ENGINE, "xfer-1", "the client left", one.ticket_id, 48)
    assert [ask(release), ask(release)] == [Acknowledged(), Acknowledged()]
    assert messages(listener) == [release]
    assert ask(offer(one)) == TicketTaken(), "without effect"
    assert messages(listener) == [release]


def test_a_release(listener, ask):
    release = ReleasePrompt(ENGINE, "xfer-1", "the client left", "f" * 32, 40)
    assert ask(release) == Acknowledged()
    assert messages(listener) == [release]


def test_another_start_of_the_engine(listener, ask):
    release = ReleasePrompt(ENGINE, "xfer-1", "the client left", "f" * 32, 40)
    for message in (offer(ticket()), fate(ticket()), release):
        answer = ask(msgspec.structs.replace(message, engine_id="prefill-0-0"))
        assert answer == TicketRefused(f"engine prefill-0-0 is not here; this is {ENGINE}", retry=False)
    assert messages(listener) == []


def test_unsigned_tickets_do_not_even_wait(client):
    secret = Secret(b"s" * 32)
    listener = TicketListener(ENGINE, "127.0.0.1", 0, TicketAdmission(AnyHost(), secret).check)
    try:
        answer = answer_of(listener, client, offer(ticket()))
        assert not answer.retry
        assert "not signed" in answer.reason
        assert messages(listener) == []
        good = signed(ticket(), secret, 1 << 40)
        assert answer_of(listener, client, offer(good)) == TicketTaken()
    finally:
        listener.close(5.0)


def test_only_so_many_tickets_and_releases_wait(listener, ask, monkeypatch):
    monkeypatch.setattr(ticket_listener, "_MAX_WAITING", 2)
    tickets = [ticket() for _ in range(3)]
    assert [ask(offer(each)) for each in tickets[:2]] == [TicketTaken()] * 2
    assert ask(offer(tickets[2])).retry
    settle(listener, Fate.SERVED, most=1)
    releases = [ReleasePrompt(ENGINE, "xfer-1", "", str(n) * 32, 48) for n in range(2)]
    assert [ask(each) for each in releases] == [Acknowledged(), TicketRefused("too many messages wait", retry=True)]
    assert ask(offer(tickets[2])).retry
    settle(listener, Fate.SERVED)
    assert ask(offer(tickets[2])) == TicketTaken()


def test_only_so_many_blocks_wait(ask, monkeypatch):
    monkeypatch.setattr(ticket_listener, "_MAX_WAITING_BLOCKS", 10)
    assert ask(offer(ticket(8))) == TicketTaken()
    assert ask(offer(ticket(3))).retry
    assert ask(offer(ticket(2))) == TicketTaken()


def test_only_so_many_tickets_are_remembered(listener, ask, monkeypatch):
    monkeypatch.setattr(ticket_listener, "_MAX_REMEMBERED", 1)
    tickets = [ticket(), ticket()]
    for each in tickets:
        ask(offer(each))
    settle(listener, Fate.REFUSED, "no")
    assert [ask(fate(each)).reason for each in tickets] == ["the ticket is not known here", "no"]
    assert len(listener._tickets) == len(listener._ended) == 1
