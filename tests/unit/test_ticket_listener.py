# SPDX-License-Identifier: Apache-2.0
"""Prefill's listener for tickets: what it answers at once, and what it keeps of strangers' messages."""

import secrets
import tracemalloc
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
    ProtocolError,
    ReleasePrompt,
    TicketRefused,
    TicketTaken,
    decode,
    encode,
)
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signing import signed
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill import ticket_listener
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.prefill.ticket_listener import Fate, TicketListener
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelClient

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
    listener.end(one.ticket_id)
    assert ask(fate(one)).retry
    assert ask(offer(one)) == TicketTaken(), "that decode offers it again has no effect"
    assert messages(listener) == []


def test_a_ticket_that_has_not_come(listener, ask, monkeypatch):
    """When decode has asked last is known of so many. It is told once the prompt is freed."""
    monkeypatch.setattr(ticket_listener, "_MAX_REMEMBERED", 3)
    one = ticket()
    assert listener.asked_at("xfer-1") is None
    assert ask(fate(one)).retry
    first = listener.asked_at("xfer-1")
    for number in range(2):
        ask(AskTicket(ENGINE, f"other-{number}", one.ticket_id))
    assert ask(fate(one)).retry
    assert listener.asked_at("xfer-1") > first
    ask(AskTicket(ENGINE, "other-2", one.ticket_id))
    assert listener.asked_at("other-0") is None
    assert listener.asked_at("xfer-1") is not None
    listener.refuse("xfer-1", "its room was needed")
    assert ask(fate(one)) == TicketRefused("its room was needed", retry=False)


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
    secret = Secret([b"s" * 32])
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


def asked_by(listener: TicketListener, host: str, message: Any) -> Any:
    """The answer to a message from `host`."""
    return listener._handle(message, ClientConnection(listener._server, b"", host))


def release(number: int) -> ReleasePrompt:
    return ReleasePrompt(ENGINE, "xfer-1", "", f"{number:032x}", 48)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[TicketListener]:
    """A listener at which little may wait."""
    monkeypatch.setattr(ticket_listener, "MAX_WAITING_OFFERS", 4)
    monkeypatch.setattr(ticket_listener, "MAX_WAITING_RELEASES", 4)
    monkeypatch.setattr(ticket_listener, "MAX_WAITING_BLOCKS", 200)
    made = TicketListener(ENGINE, "127.0.0.1", 0)
    yield made
    made.close(5.0)


def test_one_host_gets_half_of_what_may_wait_and_others_a_share_of_the_rest(small):
    for make, full in ((lambda n: offer(ticket()), "too many tickets"), (release, "too many messages")):
        taken = {host: [asked_by(small, host, make(10 * h + n)) for n in range(4)] for h, host in enumerate("abc")}
        refused = {host: [isinstance(each, TicketRefused) for each in answers] for host, answers in taken.items()}
        assert refused == {"a": [False, False, True, True], "b": [False, True, True, True], "c": [False] + [True] * 3}
        assert full in taken["a"][3].reason
        assert taken["a"][3].retry
    settle(small, Fate.OVER, most=2)
    assert asked_by(small, "d", offer(ticket())) == TicketTaken()


def test_releases_that_wait_keep_no_ticket_out(small):
    for n in range(9):
        asked_by(small, f"host-{n}", release(n))
    assert asked_by(small, "host-0", offer(ticket())) == TicketTaken()


def test_a_host_is_known_by_its_address_whatever_it_calls_itself(listener, client, ask):
    ask(release(1))
    with listener.waiting() as waiting:
        assert [each.peer for each in waiting] == ["127.0.0.1"]


def test_the_lists_of_tickets_that_wait_count_as_their_blocks_do(small):
    def of(*lists: int) -> OfferTicket:
        many = [[7] * length for length in lists]
        return offer(ticket_with(request_id="d", remote_block_ids=many, ticket_id=secrets.token_hex(16)))

    assert asked_by(small, "a", of(*[0] * 13)).retry
    assert asked_by(small, "a", of(90)).retry, "it alone takes more than half"
    assert asked_by(small, "a", of(80)) == TicketTaken()
    assert asked_by(small, "b", of(0, 0, 0)) == TicketTaken()
    assert asked_by(small, "b", of(0, 0)).retry
    settle(small, Fate.SERVED)
    assert asked_by(small, "b", of(80)) == TicketTaken(), "what is served waits no more"
    listener_sums = (small._offers, small._blocks, small._releases)
    settle(small, Fate.SERVED)
    assert [dict(each._of) for each in listener_sums] == [{}] * 3


def test_a_million_empty_lists_are_not_read():
    sane = encode(1, offer(ticket()))
    lists = msgspec.msgpack.encode([[]] * 1_000_000)
    frame = sane.replace(msgspec.msgpack.encode([[1, 2, 3]]), lists)
    assert len(frame) > 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="length <= 64"):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(frame)
    finally:
        tracemalloc.stop()


def test_a_refused_ticket_whose_release_waits_is_not_forgotten(listener, ask, monkeypatch):
    monkeypatch.setattr(ticket_listener, "_MAX_REMEMBERED", 1)
    ask(release(1))
    one = ticket()
    ask(offer(one))
    with listener.waiting() as waiting:
        listener.settle(waiting[1], Fate.REFUSED, "it is for another prompt")
    ask(ReleasePrompt(ENGINE, "xfer-1", "", one.ticket_id, 48))
    ask(release(2))
    settle(listener, Fate.OVER)
    assert messages(listener) == []
    assert len(listener._tickets) == len(listener._ended) == 1


def test_only_so_many_tickets_are_remembered(listener, ask, monkeypatch):
    monkeypatch.setattr(ticket_listener, "_MAX_REMEMBERED", 1)
    tickets = [ticket(), ticket()]
    for each in tickets:
        ask(offer(each))
    settle(listener, Fate.REFUSED, "no")
    assert [ask(fate(each)).reason for each in tickets] == ["the ticket is not known here", "no"]
    assert len(listener._tickets) == len(listener._ended) == 1
