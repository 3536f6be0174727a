# SPDX-License-Identifier: Apache-2.0
"""The side channel against peers that misbehave, callers that are many, and callbacks that raise."""

import queue
import threading
import time
from collections import Counter

import msgspec
import pytest
import zmq

from harness.channels import HOST, PATIENCE_S, Answer, MakeSocket, ask, assert_works, echo, endpoint_of
from harness.waiting import wait_until
from vllm_ascend_pd.core.protocol import (
    MAX_DESCRIPTION_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Acknowledged,
    Describe,
    EngineDescription,
    GrantRefused,
    Message,
    Problem,
    decode,
    encode,
)
from vllm_ascend_pd.transport.side_channel import (
    ClientConnection,
    SideChannelClient,
    SideChannelError,
    SideChannelServer,
)

BODY = msgspec.msgpack.encode(Describe("x"))


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([b""], "malformed message"),
        ([encode(1, Describe("x"))[:-1]], "malformed message"),
        ([b"", encode(1, Describe("x"))], "2 frames, expected 1"),
        (
            [msgspec.msgpack.encode((PROTOCOL_VERSION + 1, 5, msgspec.Raw(BODY)))],
            f"this side speaks {PROTOCOL_VERSION}",
        ),
        ([msgspec.msgpack.encode((0, 5, msgspec.Raw(BODY)))], "protocol version 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_answered_and_counted(client, server, raw, frames, complaint):
    dealer = raw(zmq.DEALER, server.endpoint)
    for _ in range(3):
        dealer.send_multipart(frames)
        seq, answer = decode(dealer.recv())
        assert seq == 0
        assert isinstance(answer, Problem)
        assert complaint in answer.reason
    assert server.rejected == 3
    dealer.send(encode(9, Describe("after all")))
    assert decode(dealer.recv()) == (9, GrantRefused("after all", retry=False))
    assert_works(client, server)
    assert server.rejected == 3


def test_an_answer_to_the_unreadable_is_short_and_printable(server, raw):
    """However long what it quotes: answers wait for who does not read them, and end up in logs."""
    dealer = raw(zmq.DEALER, server.endpoint)
    dealer.send(msgspec.msgpack.encode((PROTOCOL_VERSION, 1, {"type": "x\n" * 20_000})))
    _, answer = decode(dealer.recv())
    assert isinstance(answer, Problem)
    assert answer.reason.startswith("malformed message")
    assert len(answer.reason) <= 110
    assert answer.reason.isprintable()


def test_a_server_whose_answers_cannot_be_read(client, server, raw):
    babbling = raw(zmq.ROUTER)
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(endpoint_of(babbling), Describe("x"), 0.3, answers.put)
    peer, _ = babbling.recv_multipart()
    for frame in (b"", b"garbage", encode(77, Acknowledged()), encode(0, Acknowledged())):
        babbling.send_multipart([peer, frame])
    assert isinstance(answers.get(timeout=PATIENCE_S), SideChannelError)
    assert_works(client, server)


def test_a_message_that_is_too_long_costs_only_its_sender_the_connection(client, server, raw):
    assert_works(client, server)
    dealer = raw(zmq.DEALER, server.endpoint)
    events = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send(b"x" * MAX_MESSAGE_BYTES)
    assert isinstance(decode(dealer.recv())[1], Problem)  # just short enough
    dealer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    assert events.poll(PATIENCE_S * 1000)
    assert_works(client, server)
    dealer.send(encode(2, Describe("reconnected")))
    assert decode(dealer.recv()) == (2, GrantRefused("reconnected", retry=False))
    assert server.rejected == 1


def test_an_answer_that_is_too_long(client, server, raw):
    huge = raw(zmq.ROUTER)
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(endpoint_of(huge), Describe("x"), 0.5, answers.put)
    peer, request = huge.recv_multipart()
    description = EngineDescription("x" * (MAX_DESCRIPTION_BYTES + 1), "", 1, 1, ())
    huge.send_multipart([peer, encode(decode(request)[0], description)])
    assert isinstance(answers.get(timeout=PATIENCE_S), SideChannelError)
    assert_works(client, server)


# --- threads and defects -------------------------------------------------------------------------------------


def test_every_request_ends_once(client, server, raw):
    """200 requests from 4 threads: to a server, to one that never answers, to a port where nobody listens, and to an
    address that is none."""
    silent = raw(zmq.ROUTER)
    gone = raw(zmq.ROUTER)
    endpoints = [server.endpoint, endpoint_of(silent), endpoint_of(gone), "tcp://nowhere"]
    gone.close(linger=0)
    ended: Counter[tuple[int, int]] = Counter()
    right: list[bool] = []
    all_ended = threading.Semaphore(0)

    def send(thread: int) -> None:
        for n in range(50):
            served = n % 5 not in (1, 2, 3)
            endpoint = endpoints[0] if served else endpoints[n % 5]

            def done(answer: Answer, key: tuple[int, int] = (thread, n), served: bool = served) -> None:
                ended[key] += 1
                right.append(
                    (answer == GrantRefused(str(key), retry=False)) if served else type(answer) is SideChannelError
                )
                all_ended.release()

            client.request(endpoint, Describe(str((thread, n))), PATIENCE_S if served else 0.3, done)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        assert all_ended.acquire(timeout=PATIENCE_S)
    for thread in threads:
        thread.join()
    time.sleep(0.2)
    assert ended == {(thread, n): 1 for thread in range(4) for n in range(50)}
    assert right == [True] * 200


def test_a_callback_that_raises_does_not_end_the_client(client, server, raw):
    def broken(answer: Answer) -> None:
        raise RuntimeError("a defect")

    silent = raw(zmq.ROUTER)
    client.request(server.endpoint, Describe("x"), PATIENCE_S, broken)
    client.request("nonsense", Describe("x"), PATIENCE_S, broken)
    client.call(lambda: broken(Acknowledged()))
    for _ in range(3):
        client.request(endpoint_of(silent), Describe("x"), 0.1, broken)
    assert isinstance(ask(client, endpoint_of(silent), timeout_s=0.15), SideChannelError)
    assert_works(client, server)


def test_a_handler_that_raises_does_not_end_the_server(client):
    ticks = threading.Semaphore(0)

    def handle(message: Message, peer: ClientConnection) -> Message:
        if message == Describe("defect"):
            raise RuntimeError("a defect")
        return Acknowledged()

    def tick(now: float) -> None:
        ticks.release()
        raise RuntimeError("a defect")

    server = SideChannelServer(HOST, 0, handle, tick)
    try:
        assert isinstance(ask(client, server.endpoint, "defect"), Problem)
        assert ask(client, server.endpoint) == Acknowledged()
        for _ in range(4):
            assert ticks.acquire(timeout=PATIENCE_S)
        assert server.rejected == 0
    finally:
        server.close()


def test_a_client_that_reads_each_answer_loses_none(raw: MakeSocket) -> None:
    """Even if only one answer may wait. ZMQ notices late that an answer has left the queue."""
    server = SideChannelServer(HOST, 0, echo, unread_replies=1)
    dealer = raw(zmq.DEALER, server.endpoint)
    for number in range(1, 5001):
        dealer.send(encode(number, Describe("decode-0")))
        assert decode(dealer.recv())
    assert server.dropped == 0
    server.close()


class Noted(SideChannelClient):
    """Notes that its thread has closed it."""

    closed = False

    def _on_close(self) -> None:
        self.closed = True
        super()._on_close()


def test_after_a_callback_that_raises_every_request_gets_one_answer() -> None:
    """What was posted just before the end runs, too."""
    client = Noted()
    begun, go_on = threading.Event(), threading.Event()
    answers: list[int] = []

    def hold() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    def answered(number: int) -> None:
        answers.append(number)
        raise RuntimeError("a defect in a callback")

    client.call(hold)
    assert begun.wait(PATIENCE_S)
    client.call(lambda: answered(-1))
    for number in range(3):
        client.request(f"tcp://{HOST}:1", Describe("x"), PATIENCE_S, lambda _, number=number: answered(number))
    closing = threading.Thread(target=client.close)
    closing.start()
    wait_until(lambda: not client.call(lambda: None), PATIENCE_S)
    go_on.set()
    closing.join(PATIENCE_S)
    assert client.closed
    assert sorted(answers) == [-1, 0, 1, 2]


def test_a_request_that_cannot_be_sent_gets_an_answer(client) -> None:
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(f"tcp://{HOST}:1", object(), PATIENCE_S, answers.put)  # type: ignore[arg-type]
    assert isinstance(answers.get(timeout=PATIENCE_S), SideChannelError)
