# SPDX-License-Identifier: Apache-2.0
"""The side channel with a secret: who has it talks, who has another or none gets nothing, and the rest goes on."""

import logging
from pathlib import Path

import pytest
import zmq

from harness.channels import HOST, PATIENCE_S, MakeSocket, ask, assert_works, echo, endpoint_of, random_secret
from harness.kv import GQA, Side
from harness.ranks import MakePair, prompts, run
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import Describe, GrantRefused, encode
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.curve import protect_server, side_channel_keys
from vllm_ascend_pd.transport.secret_files import new_secret, write_new
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError, SideChannelServer

SHORT_S = 1.5
"""For what is never answered; what is, takes milliseconds."""


@pytest.fixture(scope="module")
def secret() -> Secret:
    return random_secret()


def test_a_plain_socket_gets_not_even_a_problem(
    client: SideChannelClient, server: SideChannelServer, raw: MakeSocket
) -> None:
    dealer = raw(zmq.DEALER, server.endpoint)
    dealer.send(encode(1, Describe("x")))
    dealer.send(b"garbage")
    assert not dealer.poll(SHORT_S * 1000)
    assert_works(client, server)
    assert server.rejected == 0, "it never came as far as a message"


@pytest.mark.parametrize("half", ["none-of-ours", "our-public-key"])
def test_a_client_with_another_secret_gets_nothing(
    secret: Secret,
    client: SideChannelClient,
    server: SideChannelServer,
    raw: MakeSocket,
    half: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not even with the server's public key, which is no secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        (public, private), ours = zmq.curve_keypair(), side_channel_keys(secret)[0]._server_public
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, ours if half == "our-public-key" else public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, private)
        dealer.connect(server.endpoint)
        with caplog.at_level(logging.DEBUG):
            dealer.send(encode(1, Describe("x")))
            assert not dealer.poll(SHORT_S * 1000)
    assert_works(client, server)
    warnings = [record.getMessage() for record in caplog.records]
    if half == "our-public-key":
        assert server.refused > 0
        assert len(warnings) == 1, "it comes again and again, and is logged once a minute"
        assert "another secret" in warnings[0]
    else:
        assert warnings == []


@pytest.mark.parametrize("with_secret", [False, True], ids=["no-secret", "secret"])
@pytest.mark.parametrize(
    ("entries", "admitted"),
    [(["127.0.0.1"], True), (["10.0.0.0/8"], False), (["10.0.0.0/8", "decode-7.example"], True)],
    ids=["listed", "elsewhere", "a-list-with-names"],
)
def test_a_client_is_admitted_by_its_address_and_its_secret(
    secret: Secret, with_secret: bool, entries: list[str], admitted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Names are not looked up, so a list with names judges no address."""
    given = secret if with_secret else None
    server = SideChannelServer(HOST, 0, echo, secret=given, hosts=HostList(entries, "is not in peers"))
    client = SideChannelClient(secret=given)
    try:
        with caplog.at_level(logging.WARNING):
            answer = ask(client, server.endpoint, "x", timeout_s=PATIENCE_S if admitted else SHORT_S)
        assert (answer == GrantRefused("x", retry=False)) is admitted
        assert (server.refused == 0) is admitted
        assert server.rejected == 0
        said = [record.getMessage() for record in caplog.records]
        assert ["from 127.0.0.1: host is not in peers" in line for line in said] == [True] * (not admitted)
    finally:
        client.close()
        server.close()


def test_a_plain_server_gets_nothing_from_who_has_a_secret(
    client: SideChannelClient, server: SideChannelServer, raw: MakeSocket
) -> None:
    plain = raw(zmq.ROUTER)
    answer = ask(client, endpoint_of(plain), "a secret", timeout_s=SHORT_S)
    assert isinstance(answer, SideChannelError)
    assert not plain.poll(0)
    assert_works(client, server)


def test_a_server_cannot_be_reached_before_its_guard_is_there(secret: Secret) -> None:
    """Without one, libzmq would let in whoever speaks CURVE."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        protect_server(router, side_channel_keys(secret)[0])
        router.bind(f"tcp://{HOST}:*")
        client = SideChannelClient(secret=secret)
        try:
            assert isinstance(ask(client, endpoint_of(router), timeout_s=SHORT_S), SideChannelError)
            assert not router.poll(0)
        finally:
            client.close()


def test_ranks_with_a_secret_send_and_receive(tmp_path: Path, make_pair: MakePair) -> None:
    path = tmp_path / "secret"
    write_new(path, new_secret())
    pair = make_pair(GQA, Side(2), Side(1), {"secret_file": str(path)})
    requests = prompts(pair, [40, 50])
    run(pair, requests)
    assert pair.wait_arrivals(2) == ({"request-0", "request-1"}, {})
    assert pair.wait_sent(2) == {}
    assert pair.differences(requests) == []
    plain = SideChannelClient()
    try:
        for endpoint in (pair.listener.endpoint, pair.descriptions[0].control):
            assert isinstance(ask(plain, endpoint, timeout_s=SHORT_S), SideChannelError)
    finally:
        plain.close()
