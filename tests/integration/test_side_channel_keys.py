# SPDX-License-Identifier: Apache-2.0
"""The side channel with keys: who has them talks, who has others or none gets nothing, and the rest goes on."""

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq

from harness.channels import HOST, PATIENCE_S, MakeSocket, ask, assert_works, echo, endpoint_of
from harness.kv import Model, Side
from harness.ranks import Pair, prompts, run
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import Describe, GrantRefused, encode
from vllm_ascend_pd.transport.keys import Keys, load_keys, new_key_file, protect_server, write_new
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError, SideChannelServer

SHORT_S = 1.5
"""For what is never answered; what is, takes milliseconds."""


def make_keys(path: Path) -> Keys:
    write_new(path, new_key_file())
    keys = load_keys(str(path))
    assert keys is not None
    return keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys")


def test_who_has_the_keys_is_answered(client: SideChannelClient, server: SideChannelServer) -> None:
    for n in range(20):
        assert ask(client, server.endpoint, str(n)) == GrantRefused(str(n), retry=False)
    assert server.rejected == 0


def test_what_travels_cannot_be_read(keys: Keys, client: SideChannelClient, server: SideChannelServer) -> None:
    """Through a relay that keeps what passes."""
    relay = _Relay(int(server.endpoint.rpartition(":")[2]))
    try:
        words = "nobody else may read this"
        assert ask(client, relay.endpoint, words) == GrantRefused(words, retry=False)
        assert len(relay.seen) > 500
        assert words.encode() not in relay.seen
        plain_server, plain_client = SideChannelServer(HOST, 0, echo), SideChannelClient()
        plain = _Relay(int(plain_server.endpoint.rpartition(":")[2]))
        try:
            assert ask(plain_client, plain.endpoint, words) == GrantRefused(words, retry=False)
            assert words.encode() in plain.seen, "this test would not see what can be read"
        finally:
            plain.close()
            plain_client.close()
            plain_server.close()
    finally:
        relay.close()


def test_a_plain_client_gets_nothing(client: SideChannelClient, server: SideChannelServer) -> None:
    plain = SideChannelClient()
    try:
        answer = ask(plain, server.endpoint, timeout_s=SHORT_S)
        assert isinstance(answer, SideChannelError)
        assert_works(client, server)
    finally:
        plain.close()


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
def test_a_client_with_other_keys_gets_nothing(
    keys: Keys,
    client: SideChannelClient,
    server: SideChannelServer,
    raw: MakeSocket,
    half: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not even with the server's public key, which is no secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        public, secret = zmq.curve_keypair()
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys._server_public if half == "our-public-key" else public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dealer.connect(server.endpoint)
        with caplog.at_level(logging.DEBUG):
            dealer.send(encode(1, Describe("x")))
            assert not dealer.poll(SHORT_S * 1000)
    assert_works(client, server)
    warnings = [record.getMessage() for record in caplog.records]
    if half == "our-public-key":
        assert server.refused > 0
        assert len(warnings) == 1, "it comes again and again, and is logged once a minute"
        assert "another cluster's keys" in warnings[0]
    else:
        assert warnings == []


@pytest.mark.parametrize("with_keys", [False, True], ids=["no-keys", "keys"])
@pytest.mark.parametrize(
    ("entries", "admitted"),
    [(["127.0.0.1"], True), (["10.0.0.0/8"], False), (["10.0.0.0/8", "decode-7.example"], True)],
    ids=["listed", "elsewhere", "a-list-with-names"],
)
def test_a_client_is_admitted_by_its_address_and_its_keys(
    keys: Keys, with_keys: bool, entries: list[str], admitted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Names are not looked up, so a list with names judges no address."""
    given = keys if with_keys else None
    server = SideChannelServer(HOST, 0, echo, keys=given, hosts=HostList(entries, "is not in prefill_allowlist"))
    client = SideChannelClient(keys=given)
    try:
        with caplog.at_level(logging.WARNING):
            answer = ask(client, server.endpoint, "x", timeout_s=PATIENCE_S if admitted else SHORT_S)
        assert (answer == GrantRefused("x", retry=False)) is admitted
        assert (server.refused == 0) is admitted
        assert server.rejected == 0
        said = [record.getMessage() for record in caplog.records]
        assert ["from 127.0.0.1: host is not in prefill_allowlist" in line for line in said] == [True] * (not admitted)
    finally:
        client.close()
        server.close()


def test_another_clusters_client_is_told_what_to_look_at(server: SideChannelServer, tmp_path: Path) -> None:
    other = SideChannelClient(keys=make_keys(tmp_path / "other"))
    try:
        answer = ask(other, server.endpoint, timeout_s=SHORT_S)
        assert str(answer) == "no answer in time; does it have the same side_channel_key_file?"
    finally:
        other.close()


def test_a_plain_server_gets_nothing_from_who_has_keys(
    client: SideChannelClient, server: SideChannelServer, raw: MakeSocket
) -> None:
    plain = raw(zmq.ROUTER)
    answer = ask(client, endpoint_of(plain), "a secret", timeout_s=SHORT_S)
    assert isinstance(answer, SideChannelError)
    assert not plain.poll(0)
    assert_works(client, server)


def test_a_server_cannot_be_reached_before_its_guard_is_there(keys: Keys) -> None:
    """Without one, libzmq would let in whoever speaks CURVE."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        protect_server(router, keys)
        router.bind(f"tcp://{HOST}:*")
        client = SideChannelClient(keys=keys)
        try:
            assert isinstance(ask(client, endpoint_of(router), timeout_s=SHORT_S), SideChannelError)
            assert not router.poll(0)
        finally:
            client.close()


def test_two_servers_in_one_process(
    keys: Keys, client: SideChannelClient, server: SideChannelServer, tmp_path: Path
) -> None:
    """Each asks its own guard."""
    others = make_keys(tmp_path / "other")
    other_server, other_client = SideChannelServer(HOST, 0, echo, keys=others), SideChannelClient(keys=others)
    try:
        assert_works(client, server)
        assert_works(other_client, other_server)
        assert isinstance(ask(client, other_server.endpoint, timeout_s=SHORT_S), SideChannelError)
    finally:
        other_client.close()
        other_server.close()
    assert_works(client, server)


def test_nothing_is_left_after_close(keys: Keys) -> None:
    def use_and_close() -> None:
        server = SideChannelServer(HOST, 0, echo, name="pd-test-server", keys=keys)
        clients = [SideChannelClient(name="pd-test-client", keys=keys), SideChannelClient(name="pd-test-client")]
        assert_works(clients[0], server)
        clients[1].request(server.endpoint, Describe("x"), PATIENCE_S, lambda answer: None)
        time.sleep(0.05)
        for channel in (server, *clients):
            channel.close()

    use_and_close()  # what ZMQ and its cryptography keep for the whole process, they have now
    process = psutil.Process()
    descriptors = process.num_fds()
    for _ in range(5):
        use_and_close()
    deadline = time.monotonic() + PATIENCE_S
    while process.num_fds() > descriptors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.num_fds() <= descriptors
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pd-test")]


def test_ranks_with_keys_send_and_receive(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    pair = Pair(Model(), Side(2), Side(1), {"side_channel_key_file": str(path)})
    try:
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
    finally:
        assert pair.close() == []


class _Relay:
    """Passes one connection on to `port`, and keeps the bytes that came from the client."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._server = socket.create_connection((HOST, port))
        self._client: socket.socket | None = None
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._client, _ = self._listener.accept()
        back = threading.Thread(target=self._pass, args=(self._server, self._client, bytearray()))
        self._threads.append(back)
        back.start()
        self._pass(self._client, self._server, self.seen)

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen += data
                target.sendall(data)

    def close(self) -> None:
        for connection in (self._client, self._server):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for connection in (self._client, self._server, self._listener):
            if connection is not None:
                connection.close()
