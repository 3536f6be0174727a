# SPDX-License-Identifier: Apache-2.0
"""Tickets that decode hands straight to a prefill engine: over a real side channel, to an engine that is played."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from harness.channels import HOST, random_secret
from harness.scheduling import make_ticket
from harness.tcp_server import serving
from harness.ticket_takers import NOT_YET, REFUSED, TAKEN, UNKNOWN, MakeTaker, TicketTaker
from harness.waiting import wait_until
from vllm_ascend_pd.connector.bootstrap_server import BootstrapServer, answer_of
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.observer import Observed, Observer, PostRetried
from vllm_ascend_pd.core.protocol import Acknowledged, AskTicket, OfferTicket, Problem, ReleasePrompt
from vllm_ascend_pd.decode import prefill_client
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.ticket_client import PostOutcome
from vllm_ascend_pd.transport.peers import Peers

TICKET = make_ticket(100, [3])
HOSTS = HostList(["127.0.0.0/8"], "is not allowed")
LISTED = Peers(None, HOSTS, HOSTS)
CONFIG = ConnectorConfig(grant_timeout_s=0.5)


class Retries(Observer):
    count = 0

    def on(self, event: Observed) -> None:
        self.count += isinstance(event, PostRetried)


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client, "_ASK_EVERY_S", 0.05)


@pytest.fixture
def taker() -> Iterator[MakeTaker]:
    made: list[TicketTaker] = []

    def make(*args: Any, **settings: Any) -> TicketTaker:
        made.append(TicketTaker(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def retries() -> Retries:
    return Retries()


@pytest.fixture
def client(retries: Retries) -> Iterator[PrefillClient]:
    client = PrefillClient(LISTED, CONFIG, observer=retries)
    yield client
    client.close()


def offer(client: PrefillClient, params: dict[str, Any]) -> None:
    client.offer(TICKET, client.parse_holder(params))


def outcome(client: PrefillClient) -> PostOutcome:
    outcomes: list[PostOutcome] = []
    wait_until(lambda: outcomes.extend(client.poll()) or outcomes, 20)
    [only] = outcomes
    assert only.key == TICKET.ticket_id
    return only


def test_prefill_takes_the_ticket_and_forgets_it_when_it_is_done(client: PrefillClient, taker: MakeTaker) -> None:
    prefill = taker(questions=[TAKEN, TAKEN, UNKNOWN])
    offer(client, prefill.params)
    assert outcome(client).ok
    assert prefill.got[0] == OfferTicket("prefill-0-12ab", "t-1", TICKET)
    assert prefill.of(AskTicket) == 3 * [AskTicket("prefill-0-12ab", "t-1", TICKET.ticket_id)]


def test_prefill_that_has_no_room_is_asked_again(taker: MakeTaker, retries: Retries) -> None:
    prefill = taker([NOT_YET, NOT_YET, TAKEN], [UNKNOWN])
    with closing(PrefillClient(LISTED, observer=retries)) as client:
        offer(client, prefill.params)
        assert outcome(client).ok
    assert len(prefill.of(OfferTicket)) == 3
    assert retries.count == 2


@pytest.mark.parametrize(
    ("offers", "questions", "reason"),
    [
        ([REFUSED], [TAKEN], "refuses the ticket: it is for another prompt"),
        ([NOT_YET], [TAKEN], "did not take the ticket in 0.5 s: no room for it"),
        ([Problem("cannot read it")], [TAKEN], "refuses the ticket: cannot read it"),
        ([TAKEN], [TAKEN, REFUSED], "does not serve the ticket: it is for another prompt"),
        ([TAKEN], [Problem("what?")], "does not serve the ticket: what?"),
    ],
)
def test_refused(client: PrefillClient, taker: MakeTaker, offers: list[Any], questions: list[Any], reason: str) -> None:
    offer(client, taker(offers, questions).params)
    ended = outcome(client)
    assert not ended.ok
    assert reason in ended.reason
    assert "prefill engine at tcp://127.0.0.1:" in ended.reason


def test_no_prefill_engine_answers(taker: MakeTaker) -> None:
    """It ends after three silent rounds."""
    with socket.socket() as unheard:
        unheard.bind((HOST, 0))
        params = taker().params | {"ticket_port": unheard.getsockname()[1]}
        with closing(PrefillClient(LISTED, msgspec.structs.replace(CONFIG, control_timeout_s=0.1))) as client:
            offer(client, params)
            assert "does not take the ticket: no answer in time" in outcome(client).reason


def test_prefill_dies_with_the_ticket(taker: MakeTaker) -> None:
    prefill = taker()
    with closing(PrefillClient(LISTED, msgspec.structs.replace(CONFIG, control_timeout_s=0.2))) as client:
        offer(client, prefill.params)
        wait_until(lambda: prefill.of(AskTicket), 20)
        prefill.close()
        assert "took the ticket and does not answer any more" in outcome(client).reason


def test_an_ended_ticket_has_no_outcome(client: PrefillClient, taker: MakeTaker) -> None:
    prefill = taker()
    offer(client, prefill.params)
    wait_until(lambda: prefill.of(AskTicket), 20)
    client.cancel(TICKET.ticket_id)
    client.release(client.parse_holder(prefill.params), TICKET, "the request was aborted")
    wait_until(lambda: prefill.of(ReleasePrompt), 20)
    asked = len(prefill.of(AskTicket))
    time.sleep(0.3)
    assert len(prefill.of(AskTicket)) <= asked + 1
    named = (TICKET.ticket_id, TICKET.num_tokens, TICKET.prompt)
    released = ReleasePrompt("prefill-0-12ab", "t-1", "the request was aborted", *named)
    assert prefill.of(ReleasePrompt) == [released]
    assert client.poll() == []


def test_prefill_that_has_no_room_for_a_release_is_told_again(client: PrefillClient, taker: MakeTaker) -> None:
    """Otherwise it would hold the prompt until nobody has asked for `hold_timeout_s`."""
    prefill = taker(releases=[NOT_YET, Acknowledged()])
    client.release(client.parse_holder(prefill.params), TICKET, "the request was aborted")
    wait_until(lambda: len(prefill.of(ReleasePrompt)) == 2, 20)


def test_closing_ends_everything(taker: MakeTaker) -> None:
    client = PrefillClient(LISTED, CONFIG)
    prefill = taker()
    offer(client, prefill.params)
    wait_until(lambda: prefill.of(AskTicket), 20)
    client.close()
    client.close()
    offer(client, prefill.params)
    client.release(client.parse_holder(prefill.params), TICKET, "late")
    client.cancel(TICKET.ticket_id)
    assert [each.reason for each in client.poll()] == ["the ticket was not sent: the engine is shutting down"]


def test_an_engine_with_another_secret_gets_no_ticket(taker: MakeTaker) -> None:
    prefill = taker(secret=random_secret())
    config = msgspec.structs.replace(CONFIG, control_timeout_s=0.3)
    with closing(PrefillClient(Peers(random_secret(), HOSTS, HOSTS), config)) as client:
        offer(client, prefill.params)
        assert "the same secret" in outcome(client).reason
        assert prefill.got == []


# Mooncake's routers name a bootstrap server.


def mooncake(port: int, engine_id: str = "prefill-0") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "transfer_id": "xfer-1",
        "remote_bootstrap_addr": f"http://{HOST}:{port}",
    }


@contextmanager
def bootstrap(answer: bytes, port: int = 0) -> Iterator[BootstrapServer]:
    server = BootstrapServer(HOST, port, answer)
    try:
        yield server
    finally:
        server.close(5)


def answer_http(connection: socket.socket, body: bytes, status: str = "200 OK") -> None:
    """Answers one request, and closes. The other side may have gone."""
    with connection, suppress(OSError):
        connection.recv(65536)
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)


def test_a_bootstrap_server_says_where_tickets_go(client: PrefillClient, taker: MakeTaker) -> None:
    prefill = taker(questions=[UNKNOWN])
    with bootstrap(answer_of("prefill-0", "prefill-0-12ab", HOST, prefill.port)) as server:
        offer(client, mooncake(server.port))
        assert outcome(client).ok
    assert prefill.got[0] == OfferTicket("prefill-0-12ab", "xfer-1", TICKET)
    offer(client, mooncake(server.port))  # its answer is remembered
    assert outcome(client).ok


def test_a_restarted_engine_is_looked_up_again(client: PrefillClient, taker: MakeTaker) -> None:
    prefill = taker([TAKEN, REFUSED, TAKEN], [UNKNOWN])
    with bootstrap(answer_of("prefill-0", "prefill-0-12ab", HOST, prefill.port)) as server:
        offer(client, mooncake(server.port))
        assert outcome(client).ok
        offer(client, mooncake(server.port))
        assert not outcome(client).ok, "of the start before"
    with bootstrap(answer_of("prefill-0", "prefill-0-34cd", HOST, prefill.port), server.port) as server:
        offer(client, mooncake(server.port))
        assert outcome(client).ok
    assert [each.engine_id for each in prefill.of(OfferTicket)] == 2 * ["prefill-0-12ab"] + ["prefill-0-34cd"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answer_of("another", "another-1", HOST, 9), "does not know the engine"),
        (answer_of("prefill-0", "prefill-0-1", "192.0.2.1", 9), "host is not allowed"),
        (b"{}", "does not know the engine"),
        (b"[]", "sent no list of engines"),
        (b"nothing", "sent no list of engines"),
        (b'{"0": {"engine_id": 7, "worker_addr": {}}}', "sent no list of engines"),
    ],
)
def test_bootstrap_answers_that_do_not_help(client: PrefillClient, answer: bytes, reason: str) -> None:
    with bootstrap(answer) as server:
        offer(client, mooncake(server.port))
        assert reason in outcome(client).reason


def test_a_bootstrap_server_that_sends_1xx_answers_without_an_end(client: PrefillClient) -> None:
    """It does not keep the thread busy until the query's time is over."""

    def serve(peer: socket.socket) -> None:
        peer.recv(65536)
        while True:
            peer.sendall(1000 * b"HTTP/1.1 100 Continue\r\n\r\n")

    with serving(serve) as port:
        offer(client, mooncake(port))
        assert "the answer is too long" in outcome(client).reason


def test_a_lost_bootstrap_query_is_sent_again(client: PrefillClient, taker: MakeTaker) -> None:
    prefill = taker(questions=[UNKNOWN])
    with socket.create_server((HOST, 0)) as breaks:
        breaks.settimeout(20)
        port = breaks.getsockname()[1]
        offer(client, mooncake(port))
        connection, _ = breaks.accept()
        with connection:
            connection.recv(1)
        answer_http(breaks.accept()[0], b"{}", "500 Internal Server Error")
        answer_http(breaks.accept()[0], answer_of("prefill-0", "prefill-0-12ab", HOST, prefill.port))
        assert outcome(client).ok
    assert prefill.got[0] == OfferTicket("prefill-0-12ab", "xfer-1", TICKET)


def test_a_bootstrap_answer_that_comes_late(client: PrefillClient, taker: MakeTaker) -> None:
    """Tickets of one engine that wait for it are all delivered. If a client leaves meanwhile, its prompt is released
    and its ticket is not."""
    prefill = taker(questions=[UNKNOWN])
    left = msgspec.structs.replace(TICKET, ticket_id="1" * 32)
    with socket.create_server((HOST, 0)) as slow, ThreadPoolExecutor(3) as answering:
        slow.settimeout(20)
        params = mooncake(slow.getsockname()[1])
        for ticket in (TICKET, left):
            client.offer(ticket, client.parse_holder(params))
        connections = [slow.accept()[0] for _ in range(2)]
        client.cancel(left.ticket_id)
        client.release(client.parse_holder(params), left, "the client left")
        connections.append(slow.accept()[0])
        time.sleep(0.4)
        assert prefill.got == []
        body = answer_of("prefill-0", "prefill-0-12ab", HOST, prefill.port)
        list(answering.map(lambda connection: answer_http(connection, body), connections))
        assert outcome(client).ok
    wait_until(lambda: prefill.of(ReleasePrompt), 20)
    assert [each.ticket.ticket_id for each in prefill.of(OfferTicket)] == [TICKET.ticket_id]
    assert [each.ticket_id for each in prefill.of(ReleasePrompt)] == [left.ticket_id]


def test_a_served_ticket_needs_no_bootstrap_server(client: PrefillClient, taker: MakeTaker) -> None:
    """Another delivery drops the server's entry while the ticket is on its way. The server is down by then."""

    class DropsTheEntry(TicketTaker):
        def _handle(self, message: Any, connection: Any) -> Any:
            if isinstance(message, OfferTicket):
                server.close(5)
                addresses = client._addresses
                addresses.forget(client.parse_holder(mooncake(server.port)))
            return super()._handle(message, connection)

    prefill = DropsTheEntry(questions=[TAKEN, UNKNOWN])
    server = BootstrapServer(HOST, 0, answer_of("prefill-0", "prefill-0-12ab", HOST, prefill.port))
    try:
        offer(client, mooncake(server.port))
        assert outcome(client) == PostOutcome(TICKET.ticket_id, ok=True)
        assert prefill.of(AskTicket) == 2 * [AskTicket("prefill-0-12ab", "xfer-1", TICKET.ticket_id)]
    finally:
        prefill.close()


def test_no_bootstrap_server() -> None:
    with socket.socket() as unheard:
        unheard.bind((HOST, 0))
        with closing(PrefillClient(LISTED, msgspec.structs.replace(CONFIG, control_timeout_s=0.2))) as client:
            offer(client, mooncake(unheard.getsockname()[1]))
            assert "bootstrap server does not answer" in outcome(client).reason
