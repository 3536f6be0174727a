# SPDX-License-Identifier: Apache-2.0
"""The side channel over real ZMQ sockets on the loopback interface: what is asked, answered and left behind."""

import itertools
import os
import queue
import re
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq

from harness.channels import HOST, PATIENCE_S, Answer, ask, assert_works, echo, endpoint_of, random_secret
from harness.waiting import wait_until
from vllm_ascend_pd.core.bounds import MAX_TURN_S
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    Describe,
    GrantRefused,
    Message,
    Problem,
    Revoke,
    WriterId,
    decode,
    encode,
)
from vllm_ascend_pd.transport.loop import TICK_S
from vllm_ascend_pd.transport.side_channel import (
    ClientConnection,
    SideChannelClient,
    SideChannelError,
    SideChannelServer,
)

WRITER = WriterId("prefill-0", 0, 0)


def test_messages_do_not_make_ticks():
    """Each looks at all that is open. On a machine that takes long for a message this asks for less."""
    ticks: list[list[float]] = [[], []]
    server = SideChannelServer(HOST, 0, echo, tick=ticks[0].append)
    client = SideChannelClient(tick=ticks[1].append)
    try:
        began = time.monotonic()
        for n in range(300):
            assert ask(client, server.endpoint, str(n)) == GrantRefused(str(n), retry=False)
        wait_until(lambda: all(ticks), PATIENCE_S)
        most = 2 + (time.monotonic() - began) / TICK_S
        assert all(sum(tick >= began for tick in found) <= most for found in ticks)
    finally:
        client.close()
        server.close()


def test_deadlines_pass_while_messages_wait(raw):
    """Otherwise a peer that always has another message waiting would keep deadlines, and other threads, waiting."""
    all_sent = threading.Event()
    events: list[str] = []

    def handle(message: Message, peer: ClientConnection) -> Message:
        all_sent.wait(PATIENCE_S)
        events.append("message")
        time.sleep(TICK_S / 10)
        return echo(message, peer)

    server = SideChannelServer(HOST, 0, handle, tick=lambda now: events.append("tick"))
    try:
        dealer = raw(zmq.DEALER, server.endpoint)
        for n in range(200):  # fewer than may wait
            dealer.send(encode(n + 1, Describe("x")))
        all_sent.set()
        for _ in range(200):
            dealer.recv()
        runs = [len(list(run)) for event, run in itertools.groupby(events) if event == "message"]
        assert sum(runs) == 200
        assert max(runs) < 50, "ticks come between"
    finally:
        all_sent.set()
        server.close()


def test_other_threads_get_their_turn_while_messages_wait(raw):
    """Each message takes a quarter of a turn, and all of them wait at once."""
    messages, handled = 200, 0
    entered, begin = threading.Event(), threading.Event()

    def slowly(message: Message, peer: ClientConnection) -> Message:
        nonlocal handled
        entered.set()
        begin.wait(PATIENCE_S)
        time.sleep(MAX_TURN_S / 4)
        handled += 1
        return echo(message, peer)

    server = SideChannelServer(HOST, 0, slowly)
    try:
        dealer = raw(zmq.DEALER, server.endpoint)
        for number in range(messages):
            dealer.send(encode(number + 1, Describe("x")))
        assert entered.wait(PATIENCE_S)
        at: queue.Queue[int] = queue.Queue()
        assert server.call(lambda: at.put(handled))
        begin.set()
        assert at.get(timeout=PATIENCE_S) < messages // 4
        for _ in range(messages):
            dealer.recv()
    finally:
        server.close()


def test_an_answer_that_comes_too_late_is_dropped(client, raw):
    slow = raw(zmq.ROUTER)
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(endpoint_of(slow), Describe("late"), 0.1, answers.put)
    peer, request = slow.recv_multipart()
    assert isinstance(answers.get(timeout=PATIENCE_S), SideChannelError)
    slow.send_multipart([peer, encode(decode(request)[0], Acknowledged())])
    client.request(endpoint_of(slow), Describe("in time"), PATIENCE_S, answers.put)
    peer, request = slow.recv_multipart()
    seq, message = decode(request)
    assert message == Describe("in time")
    for _ in range(2):  # the second one is of a request that has ended
        slow.send_multipart([peer, encode(seq, GrantRefused("yes", retry=True))])
    assert answers.get(timeout=PATIENCE_S) == GrantRefused("yes", retry=True)
    assert ask(client, endpoint_of(slow), timeout_s=0.1).__class__ is SideChannelError
    assert answers.empty()


def test_an_answer_counts_only_from_where_it_was_asked(client, raw):
    asked, meddler = raw(zmq.ROUTER), raw(zmq.ROUTER)
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(endpoint_of(meddler), Describe("first"), PATIENCE_S, answers.put)
    client.request(endpoint_of(asked), Describe("second"), PATIENCE_S, answers.put)
    meddlers_peer, first = meddler.recv_multipart()
    peer, second = asked.recv_multipart()
    meddler.send_multipart([meddlers_peer, encode(decode(second)[0], Problem("forged"))])
    meddler.send_multipart([meddlers_peer, encode(decode(first)[0], Acknowledged())])
    assert answers.get(timeout=PATIENCE_S) == Acknowledged()
    asked.send_multipart([peer, encode(decode(second)[0], GrantRefused("genuine", retry=False))])
    assert answers.get(timeout=PATIENCE_S) == GrantRefused("genuine", retry=False)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "tcp://127.0.0.1", "gopher://x:1"])
def test_an_endpoint_that_cannot_be(client, server, endpoint):
    answer = ask(client, endpoint)
    assert isinstance(answer, SideChannelError)
    assert "nothing can be sent: " in str(answer)
    assert_works(client, server)


def test_forgetting_a_server(client, server, raw):
    silent = raw(zmq.ROUTER)
    answers: queue.Queue[Answer] = queue.Queue()
    for endpoint in (endpoint_of(silent), endpoint_of(silent), server.endpoint):
        client.request(endpoint, Describe("x"), PATIENCE_S, answers.put)
    client.forget(endpoint_of(silent))
    client.forget("tcp://127.0.0.1:1")  # never heard of
    ended = [answers.get(timeout=PATIENCE_S) for _ in range(3)]
    errors = [str(answer) for answer in ended if isinstance(answer, SideChannelError)]
    assert errors == ["the connection was closed"] * 2
    client.forget(server.endpoint)
    assert_works(client, server)


class Talk:
    """A client that has asked a server, which can answer unasked since then."""

    def __init__(self) -> None:
        peers: queue.Queue[ClientConnection] = queue.Queue()

        def handle(message: Message, peer: ClientConnection) -> Message:
            peers.put(peer)
            return Acknowledged()

        self.unasked: queue.Queue[tuple[str, Message]] = queue.Queue()
        self.server = SideChannelServer(HOST, 0, handle)
        self.client = SideChannelClient(lambda endpoint, message: self.unasked.put((endpoint, message)))
        assert ask(self.client, self.server.endpoint) == Acknowledged()
        self.peer = peers.get()

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.close()


def test_a_connection_that_rests_brings_what_nobody_asked_for_all_the_same(talk):
    client, endpoint = talk.client, talk.server.endpoint
    for _ in range(2):  # the second time changes nothing
        client.rest(endpoint)
    talk.peer.send(Problem("unasked"))
    assert talk.unasked.get(timeout=PATIENCE_S) == (endpoint, Problem("unasked"))
    assert ask(client, endpoint) == Acknowledged()  # rests no more
    client.rest(endpoint)
    client.forget(endpoint)
    client.rest("tcp://127.0.0.1:1")  # never heard of
    assert ask(client, endpoint) == Acknowledged()
    talk.close()
    talk.peer.send(Problem("from a closed server"))


def test_no_connection_rests_while_an_answer_is_expected(client, raw):
    slow = raw(zmq.ROUTER)
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(endpoint_of(slow), Describe("x"), PATIENCE_S, answers.put)
    peer, request = slow.recv_multipart()
    client.rest(endpoint_of(slow))
    assert isinstance(ask(client, "nonsense"), SideChannelError)  # that has been dealt with
    polled = len(client._poller.sockets)
    slow.send_multipart([peer, encode(decode(request)[0], Acknowledged())])
    assert answers.get(timeout=PATIENCE_S) == Acknowledged()
    client.rest(endpoint_of(slow))
    wait_until(lambda: len(client._poller.sockets) < polled, PATIENCE_S)


def test_a_message_to_a_peer_whose_connection_is_closed(caplog):
    """It is told from one that does not read; the answer to a request that is too late is dropped without a word."""
    peers: queue.Queue[ClientConnection] = queue.Queue()
    answer_now = threading.Event()

    def handle(message: Message, peer: ClientConnection) -> Message:
        peers.put(peer)
        answer_now.wait(PATIENCE_S)
        return Acknowledged()

    gone = threading.Event()
    server = SideChannelServer(HOST, 0, handle)
    client = SideChannelClient()
    try:
        client.request(server.endpoint, Describe("x"), PATIENCE_S, lambda answer: None)
        peer = peers.get(timeout=PATIENCE_S)
        client.close()
        answer_now.set()
        deadline = time.monotonic() + PATIENCE_S
        while not gone.wait(0.05) and time.monotonic() < deadline:
            peer.send(Revoke("0" * 32, WRITER, "to nobody"), gone.set)
        assert gone.is_set()
        other = SideChannelClient()
        client = other
        assert ask(other, server.endpoint) == Acknowledged()
        gone.clear()
        assert peers.get(timeout=PATIENCE_S) != peer
        assert not caplog.records
    finally:
        client.close()
        server.close()


def test_a_peer_that_does_not_read_is_not_gone():
    """Its process is stopped, say: its host answers for it, whatever piles up here."""
    peers: queue.Queue[ClientConnection] = queue.Queue()

    def handle(message: Message, peer: ClientConnection) -> Message:
        peers.put(peer)
        return Acknowledged()

    server = SideChannelServer(HOST, 0, handle)
    stuck = threading.Event()
    client = SideChannelClient(lambda endpoint, message: stuck.wait(PATIENCE_S))
    gone = threading.Event()
    try:
        assert ask(client, server.endpoint) == Acknowledged()
        peer = peers.get(timeout=PATIENCE_S)
        for _ in range(20):
            for _ in range(1000):
                peer.send(Revoke("0" * 32, WRITER, "x" * 1000), gone.set)
            time.sleep(0.02)
        other = SideChannelClient()
        assert ask(other, server.endpoint) == Acknowledged()
        other.close()
        assert not gone.is_set()
    finally:
        stuck.set()
        client.close()
        server.close()


def test_what_nobody_reads_is_dropped_and_logged_ever_less_often(client, raw, caplog):
    server = SideChannelServer(HOST, 0, lambda message, peer: GrantRefused("x" * 1000, retry=False), unread_replies=4)
    deaf = raw(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(server.endpoint)
    try:
        while server.dropped < 100:
            deaf.send(encode(1, Describe("x")))
        assert ask(client, server.endpoint) == GrantRefused("x" * 1000, retry=False)
    finally:
        deaf.close(linger=0)  # first: libzmq may wait for ever for a connection that broke with answers unread
        server.close()
    assert len(caplog.records) == server.dropped.bit_length()
    assert caplog.messages[6].endswith("64 so far): it will ask again")


def test_a_thread_that_does_not_end_is_not_waited_for(caplog):
    """Nor are its sockets closed under it: that is for the thread itself, when it comes to it."""
    client, begun, may_end = SideChannelClient(name="pd-test-busy"), threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    client.call(busy)
    assert begun.wait(PATIENCE_S)
    client.close(timeout_s=0.1)
    try:
        assert [record.message for record in caplog.records] == [
            "side channel: thread pd-test-busy did not end within 0.1 s"
        ]
        assert not client._context.closed
    finally:
        may_end.set()
    wait_until(lambda: client._context.closed, PATIENCE_S)
    client._thread.join(PATIENCE_S)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("with_secret", [False, True], ids=["no-secret", "secret"])
def test_nothing_is_left_after_close(raw, with_secret):
    silent = raw(zmq.ROUTER)
    secret = random_secret() if with_secret else None

    def use_and_close() -> None:
        server = SideChannelServer(HOST, 0, echo, name="pd-test-server", secret=secret)
        clients = [SideChannelClient(name="pd-test-client", secret=secret) for _ in range(3)]
        for client in clients:
            assert_works(client, server)
            client.request(endpoint_of(silent), Describe("under way"), PATIENCE_S, lambda answer: None)
        for channel in (server, *clients):
            channel.close()
            channel.close()  # twice is safe
        clients[0].request(server.endpoint, Describe("x"), 0.1, lambda answer: None)
        clients[0].forget(server.endpoint)

    use_and_close()  # what ZMQ keeps for the whole process, it has now
    process = psutil.Process()
    ours = {connection.laddr.port for connection in process.net_connections("tcp") if connection.status == "LISTEN"}
    threads, descriptors = {thread.id for thread in process.threads()}, process.num_fds()
    for _ in range(5):
        use_and_close()
    deadline = time.monotonic() + PATIENCE_S  # `silent` notices that its peers are gone when it gets to it
    while process.num_fds() > descriptors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.num_fds() <= descriptors
    # Who joins a thread may still see it for a moment: Python says that it has ended before the system does.
    wait_until(lambda: {thread.id for thread in process.threads()} <= threads, PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pd-test")]
    listening = {c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"}
    assert listening <= ours


def test_a_port_that_is_taken(server):
    port = int(server.endpoint.rpartition(":")[2])
    before = psutil.Process().num_fds()
    holder = rf"by process {os.getpid()} \({re.escape(psutil.Process().name()[:10])}.*\)"
    with pytest.raises(SideChannelError, match=f"cannot listen on {HOST}:{port}: Address already in use.* {holder}"):
        SideChannelServer(HOST, port, echo)
    assert psutil.Process().num_fds() <= before


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_this_one(host):
    with pytest.raises(SideChannelError, match=f"cannot listen on {host}:0"):
        SideChannelServer(host, 0, echo)
