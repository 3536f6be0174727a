# SPDX-License-Identifier: Apache-2.0
"""Addresses that routers and clients name, with a secret: over real sockets, decode connects to what is signed or what
`peers` names, and to nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_standin import make_ticket
from metaserver_posts import *  # noqa: F403
from metaserver_posts import QUICK, Metaserver, outcome_of, outcomes
from proxy_cluster import COMPLETION, running_cluster

from harness.channels import HOST
from harness.scheduling import make_ticket as ticket_of
from harness.tcp_server import unvisited
from harness.ticket_takers import UNKNOWN, TicketTaker
from harness.waiting import wait_until
from vllm_ascend_pd.connector.bootstrap_server import BootstrapServer, answer_of
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import AnyHost, HostList
from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH, OfferTicket, ReleasePrompt, TransferFailure
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import metaserver_tokens, sign_listener, sign_metaserver
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.ticket_client import NoRecipientError, PostOutcome
from vllm_ascend_pd.decode.tickets import TicketRecipients
from vllm_ascend_pd.transport.peers import Peers

OLD, NEW = 32 * b"o", 32 * b"n"
SECRET = Secret([OLD])
TICKET = ticket_of(100, [3])


def peers(*named: str) -> Peers:
    """A decode engine's, with the secret and these entries in `peers`."""
    hosts = HostList(named, "is not in peers")
    return Peers(SECRET, hosts if named else AnyHost(), hosts)


@contextlib.contextmanager
def decode(
    *named: str, secret: Secret = SECRET, urls: tuple[str, ...] = (), **settings: Any
) -> Iterator[TicketRecipients]:
    """Decode's clients, as its scheduler has them. `named`, `urls`: in `peers`."""
    config = ConnectorConfig(transfer_timeout_s=10, peers=(*named, *urls), **settings)
    recipients = TicketRecipients(MetaserverClient(config, HOST, secret=secret), PrefillClient(peers(*named), config))
    with closing(recipients):
        yield recipients


@pytest.fixture
def prefill() -> Iterator[TicketTaker]:
    with closing(TicketTaker(questions=[UNKNOWN], secret=SECRET)) as taker:
        yield taker


def signed(params: dict[str, Any]) -> dict[str, Any]:
    where = params["remote_engine_id"], params["ticket_host"], params["ticket_port"], params["transfer_id"]
    return params | {"ticket_listener_signature": sign_listener(SECRET, *where)}


def send(recipients: TicketRecipients, params: dict[str, Any]) -> PostOutcome:
    """Sends the ticket as the scheduler does, and returns the outcome."""
    recipients.of(params).send(TICKET, [])
    ended: list[PostOutcome] = []
    wait_until(lambda: ended.extend(recipients.poll()) or ended, 20)
    [only] = ended
    return only


def all_ways(recipients: TicketRecipients, params: dict[str, Any]) -> str:
    """Tries all that decode's scheduler does with a request. Returns why each of it is refused."""
    recipients.no_ticket(params, TICKET, "decode computes the prompt")
    with pytest.raises(NoRecipientError) as refused:
        recipients.of(params)
    return str(refused.value)


# Prefill engines.


def test_a_signed_listener_gets_the_ticket(prefill: TicketTaker) -> None:
    with decode() as recipients:
        assert send(recipients, signed(prefill.params)).ok
        recipients.no_ticket(signed(prefill.params), TICKET, "decode computes the prompt")
        wait_until(lambda: prefill.of(ReleasePrompt), 20)
    assert [each.ticket.ticket_id for each in prefill.of(OfferTicket)] == [TICKET.ticket_id]


def test_a_client_names_no_listener(prefill: TicketTaker) -> None:
    """It has seen how prefill signs, and wants the ticket elsewhere."""
    with unvisited() as port, decode() as recipients:
        elsewhere = signed(prefill.params) | {"ticket_port": port}
        assert "signature is wrong" in all_ways(recipients, elsewhere)
        assert "no signature" in all_ways(recipients, elsewhere | {"ticket_listener_signature": None})


def test_a_client_names_no_bootstrap_server(prefill: TicketTaker) -> None:
    with unvisited() as port, decode() as recipients:
        assert "name host and port in decode's peers" in all_ways(recipients, mooncake(port))
        with_more = signed(prefill.params) | {"ticket_host": None, "remote_bootstrap_addr": f"http://{HOST}:{port}"}
        assert "name host and port in decode's peers" in all_ways(recipients, with_more)


def mooncake(port: int) -> dict[str, Any]:
    """As Mooncake's routers ask."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-0",
        "transfer_id": "xfer-1",
        "remote_bootstrap_addr": f"http://{HOST}:{port}",
    }


@contextlib.contextmanager
def bootstrap(port: int, secret: Secret | None) -> Iterator[int]:
    """A bootstrap server's port. It names the listener at `port`."""
    server = BootstrapServer(HOST, 0, answer_of("prefill-0", "prefill-0-12ab", HOST, port, secret=secret))
    try:
        yield server.port
    finally:
        server.close(5)


def test_a_named_bootstrap_server_gives_signed_addresses(prefill: TicketTaker) -> None:
    """`peers` names its port alone: the listener's is signed."""
    with bootstrap(prefill.port, SECRET) as port, decode(f"{HOST}:{port}") as recipients:
        assert send(recipients, mooncake(port)).ok
    assert [each.engine_id for each in prefill.of(OfferTicket)] == ["prefill-0-12ab"]


@pytest.mark.parametrize("secret", [None, Secret([NEW])], ids=["unsigned", "another-secret"])
def test_a_named_bootstrap_server_gives_no_other_addresses(secret: Secret | None) -> None:
    with unvisited() as elsewhere, bootstrap(elsewhere, secret) as port, decode(f"{HOST}:{port}") as recipients:
        outcome = send(recipients, mooncake(port))
        assert not outcome.ok
        assert "signature" in outcome.reason


# Metaservers.


def order(url: str, signature: str = "") -> dict[str, Any]:
    """What a request says of its metaserver."""
    return {"do_remote_prefill": True, "metaserver": url, "metaserver_signature": signature}


def authorizations(metaserver: Metaserver) -> list[str | None]:
    return [headers.get("authorization") for headers in metaserver.headers]


def test_a_signed_metaserver_gets_the_derived_token(metaserver: Metaserver) -> None:
    """With tickets, failures and questions."""
    url, [token] = metaserver.url, metaserver_tokens(SECRET)
    with closing(MetaserverClient(QUICK, HOST, secret=SECRET)) as client:
        client.post("ok", url, {"id": "ok", "do": "ok"}, sign_metaserver(SECRET, url))
        assert outcomes(client, 1)[0].ok
        client.report_failure(url, TransferFailure("r", "t", "why"), sign_metaserver(SECRET, url))
        wait_until(lambda: metaserver.failures, 20)
    assert authorizations(metaserver) == 2 * [f"Bearer {token}"]


def test_a_listed_metaserver_does_not_learn_the_token(metaserver: Metaserver) -> None:
    config = ConnectorConfig(transfer_timeout_s=10, peers=(metaserver.url,))
    with closing(MetaserverClient(config, HOST, secret=SECRET)) as client:
        assert outcome_of(client, metaserver.url, "ok").ok
        client.post(
            "wrong", metaserver.url, {"id": "wrong", "do": "ok"}, sign_metaserver(Secret([NEW]), metaserver.url)
        )
        assert outcomes(client, 1)[0].ok
    assert authorizations(metaserver) == [None, None]


def test_a_token_file_comes_before_the_derived_token(metaserver: Metaserver, token_file: str) -> None:
    config = ConnectorConfig(transfer_timeout_s=10, metaserver_token_file=token_file)
    with closing(MetaserverClient(config, HOST, secret=SECRET)) as client:
        client.post("ok", metaserver.url, {"id": "ok", "do": "ok"}, sign_metaserver(SECRET, metaserver.url))
        assert outcomes(client, 1)[0].ok
    assert authorizations(metaserver) == ["Bearer a-secret"]


def test_a_client_names_no_metaserver(metaserver: Metaserver) -> None:
    """It has seen how the proxy signs, and wants the ticket elsewhere, on this host or not."""
    with unvisited() as port, decode() as recipients:
        url = f"http://{HOST}:{port}{METASERVER_PATH}"
        assert "the proxy has not signed it" in all_ways(recipients, order(url))
        assert "signature is wrong" in all_ways(recipients, order(url, sign_metaserver(SECRET, metaserver.url)))
        client = recipients._metaserver
        client.post("t", url, {}, sign_metaserver(SECRET, metaserver.url))
        assert "is refused" in outcomes(client, 1)[0].reason, "as it is before each attempt"
        client.report_failure(url, TransferFailure("r", "t", "why"))


# Our proxy.


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_bytes(OLD + b"\n")
    return file


def test_the_proxy_signs_its_metaserver_and_knows_who_posts(secret_file: Path) -> None:
    """What it hands out brings decode's posts to it."""
    with running_cluster(secret_file=str(secret_file)) as cluster, decode() as recipients:
        cluster.decode.needs_prefill = False
        assert cluster.client.post("/v1/completions", json=COMPLETION).status_code == 200
        named = cluster.decode.received[-1].body["kv_transfer_params"]
        outcome = send(recipients, named)
        # It knows the engine, and no request waits for this ticket.
        assert "answered 404" in outcome.reason
        with decode(secret=Secret([NEW])) as of_another, pytest.raises(NoRecipientError, match="signature is wrong"):
            of_another.of(named)


@pytest.mark.parametrize("content", [OLD, OLD + b"\n" + NEW, NEW + b"\n" + OLD], ids=["one", "old-new", "new-old"])
def test_the_proxy_takes_tickets_with_the_tokens_of_its_secrets(
    secret_file: Path, token_file: str, content: bytes
) -> None:
    secret_file.write_bytes(content)
    post = make_ticket("cmpl-nobody-waits", "0" * 32)
    with running_cluster(secret_file=str(secret_file), metaserver_token_file=token_file) as cluster:

        def status(authorization: str | None, path: str) -> int:
            headers = {} if authorization is None else {"Authorization": authorization}
            return cluster.client.post(path, json=post, headers=headers).status_code

        secrets = content.split()
        for path in (METASERVER_PATH, METASERVER_PATH + FAILURE_SUFFIX):
            for each in (OLD, NEW):
                [token] = metaserver_tokens(Secret([each]))
                assert (status(f"Bearer {token}", path) == 401) is (each not in secrets)
                assert status(token, path) == 401
            assert status("Bearer a-secret", path) != 401
            for wrong in (None, "", "Bearer", f"Bearer {64 * '0'}"):
                assert status(wrong, path) == 401


def test_a_client_of_the_proxy_names_no_address(secret_file: Path) -> None:
    with unvisited() as port, running_cluster(secret_file=str(secret_file)) as cluster:
        cluster.decode.needs_prefill = False
        url = f"http://{HOST}:{port}{METASERVER_PATH}"
        given = {"kv_transfer_params": {"metaserver": url, "metaserver_signature": 64 * "0"}}
        refused = cluster.client.post("/v1/completions", json=COMPLETION | given)
        assert (refused.status_code, "set by the proxy" in refused.text) == (400, True)
        beside = {"metaserver": url, "metaserver_signature": 64 * "0", "ticket_host": HOST, "vllm_xargs": given}
        assert cluster.client.post("/v1/completions", json=COMPLETION | beside).status_code == 200
        named = cluster.decode.received[-1].body["kv_transfer_params"]
        assert named["metaserver"] != url
        assert named["metaserver_signature"] == sign_metaserver(SECRET, named["metaserver"])
        assert "ticket_host" not in named
