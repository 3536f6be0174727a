# SPDX-License-Identifier: Apache-2.0
"""Attacks on the schedulers of both sides: vLLM's own, with this connector's side of them, over real sockets.

Clients name where tickets go, and peers send tickets that no scheduler should fail on.
"""

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.request import RequestStatus

from harness.attacked import Meter
from harness.channels import HOST
from harness.engines import Role
from harness.held_prompts import PREFILL_FIRST, PROMPT, Prefill, ticket_for
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import RealScheduler
from harness.tcp_server import serving, unvisited
from harness.ticket_takers import TicketTaker
from harness.waiting import wait_until
from vllm_ascend_pd.core.protocol import METASERVER_PATH, Acknowledged, OfferTicket, TicketTaken
from vllm_ascend_pd.core.signed_addresses import sign_listener
from vllm_ascend_pd.core.signing import signed
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.prefill_client import SILENT_ROUNDS
from vllm_ascend_pd.prefill.ticket_listener import EARLY_S
from vllm_ascend_pd.transport.secret_files import cluster_secret, new_secret, write_new

SURROGATE = "\ud83d"
"""Half of a pair: JSON can say it, UTF-8 cannot."""
CENTURY_S = 100 * 366 * 86400
MAX_CPU_S = 2.0
"""Of the thread that asks bootstrap servers, for all attempts of a ticket. They take 0.6 s, and more than 3 s without a
bound."""
REMEMBERED, AT_ONCE = 4096, 512
"""Tickets that prefill remembers after their end, and those of one host that may wait."""


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    write_new(path, new_secret())
    return str(path)


# Decode: a client names where its ticket goes.


def routed(port: int, **changes: object) -> dict[str, Any]:
    """A request's `kv_transfer_params` that name a prefill engine on this host."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "prefill-0", "transfer_id": "t"}
    return params | {"ticket_host": HOST, "ticket_port": port} | changes


@pytest.mark.parametrize("who_computes", ["prefill", "auto"])
def test_a_client_names_nobody_whom_decode_connects_to(
    scheduled_model: Path, secret_file: str, who_computes: str
) -> None:
    """With "auto", decode computes these short prompts and would say so to the engine that they name."""
    extra = {"secret_file": secret_file, "who_computes": who_computes}
    of_another = sign_listener(cluster_secret(secret_file), "prefill-0", HOST, 9, "t")
    with unvisited() as port, closing(RealScheduler(Role.DECODE, scheduled_model, extra=extra)) as decode:
        url = f"http://{HOST}:{port}"
        named: list[dict[str, Any]] = [
            routed(port),
            routed(port, ticket_listener_signature=of_another),
            routed(port, ticket_host=None, ticket_port=None, remote_bootstrap_addr=url),
            {"do_remote_prefill": True, "metaserver": url + METASERVER_PATH},
            {"do_remote_prefill": True, "metaserver": url + METASERVER_PATH, "metaserver_signature": of_another},
        ]
        for number, params in enumerate(named):
            decode.add(f"r{number}", range(number, number + 40), params)
        for _ in range(3):
            decode.step()
        for number in range(len(named)):
            decode.vllm.finish_requests(f"r{number}", RequestStatus.FINISHED_ABORTED)
        decode.step()


def test_a_bootstrap_server_whose_answer_does_not_begin(scheduled_model: Path) -> None:
    """It sends answers that announce another, for ever. A ticket for an honest engine is taken meanwhile."""
    left: list[int] = []

    def serve(peer: socket.socket) -> None:
        try:
            peer.recv(65536)
            while True:
                peer.sendall(1000 * b"HTTP/1.1 100 Continue\r\n\r\n")
        finally:
            left.append(1)

    with (
        serving(serve) as port,
        closing(TicketTaker()) as honest,
        closing(RealScheduler(Role.DECODE, scheduled_model)) as decode,
    ):
        meter = Meter("pd-tickets", [])
        endless = routed(port, ticket_host=None, ticket_port=None, remote_bootstrap_addr=f"http://{HOST}:{port}")
        decode.add("endless", range(40), endless)
        decode.add("honest", range(1, 41), routed(honest.port))
        decode.step()
        wait_until(lambda: honest.of(OfferTicket), 60)
        wait_until(lambda: len(left) == SILENT_ROUNDS, 60)
        assert meter.usage().cpu_s < MAX_CPU_S


# Prefill: tickets of the proxy's posts.


@pytest.fixture
def prefill(scheduled_model: Path, secret_file: str, request: pytest.FixtureRequest) -> Iterator[Prefill]:
    extra = {} if getattr(request, "param", None) == "no secret" else {"secret_file": secret_file}
    with closing(Prefill(scheduled_model, extra=extra)) as made:
        yield made


def error(prefill: Prefill, name: str, ticket: Any) -> str | None:
    """Why prefill does not serve a ticket. None: it does."""
    said = prefill.answered(name, params=ticket if isinstance(ticket, dict) else msgspec.to_builtins(ticket))
    return None if said is None else said.get("error")


@pytest.mark.parametrize("prefill", ["no secret", "secret"], indirect=True)
def test_half_of_a_surrogate_pair_anywhere_in_a_ticket(prefill: Prefill, secret_file: str) -> None:
    secret = cluster_secret(secret_file)
    assert secret is not None
    right = msgspec.to_builtins(signed(ticket_for(PROMPT), secret, int(time.time()) + 600))
    texts = [name for name, value in right.items() if isinstance(value, str) and name != "replaces"]  # not read here
    wrong = [right | {name: SURROGATE} for name in texts]
    wrong += [right | {"prompt": right["prompt"] | {name: SURROGATE}} for name in right["prompt"]]
    for number, params in enumerate(wrong):
        assert error(prefill, f"wrong-{number}", params) is not None
    assert error(prefill, "right", right) is None


def test_a_ticket_that_expires_in_a_century(prefill: Prefill, secret_file: str) -> None:
    """Who has the secret signs it. Prefill would have to remember it for so long."""
    secret = cluster_secret(secret_file)
    assert secret is not None
    now = int(time.time())
    refused = error(prefill, "century", signed(ticket_for(PROMPT), secret, now + CENTURY_S))
    assert refused is not None
    assert "expires more than a day from now" in refused
    assert error(prefill, "right", signed(ticket_for(PROMPT), secret, now + 600)) is None


# Prefill: tickets of decode's offers.


def all_taken(prefill: Prefill, messages: list[Any]) -> None:
    answers: list[Any] = []
    endpoint = f"tcp://{prefill.held.listener.host}:{prefill.held.listener.port}"
    for message in messages:
        prefill.client.request(endpoint, message, 60.0, answers.append)
    wait_until(lambda: len(answers) == len(messages), 60)
    assert all(isinstance(each, TicketTaken | Acknowledged) for each in answers), answers


@pytest.mark.parametrize("prefill", ["no secret"], indirect=True)
def test_releases_of_the_oldest_of_all_refused_tickets(prefill: Prefill) -> None:
    """They wait while others end, which makes the scheduler forget the oldest."""

    def refuse(tickets: list[Ticket]) -> None:
        for first in range(0, len(tickets), AT_ONCE):
            offers = [OfferTicket(prefill.engine_id, "t", each) for each in tickets[first : first + AT_ONCE]]
            all_taken(prefill, offers)
            prefill.wait_for_prompts()

    def many() -> list[Ticket]:
        one = ticket_for(PROMPT)
        return [msgspec.structs.replace(one, ticket_id=secrets.token_hex(16)) for _ in range(REMEMBERED)]

    refuse(tickets := many())
    late = [prefill.release_of("t", ticket_for(PROMPT)) for _ in range(8)]
    all_taken(prefill, late)
    prefill.clock.now += EARLY_S
    all_taken(prefill, [prefill.release_of("t", each) for each in tickets[:8]])
    prefill.run()
    refuse(many())

    said = prefill.answered("honest", params=PREFILL_FIRST)
    assert prefill.offer(said["transfer_id"], honest := ticket_for(PROMPT)) == TicketTaken()
    assert prefill.run()[0].tickets == {"honest": honest}
