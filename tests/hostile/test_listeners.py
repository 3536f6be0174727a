# SPDX-License-Identifier: Apache-2.0
"""A side-channel listener under attack: whatever attackers do, peers are served, and no resource is lost.

The listener is a process of its own, so its memory, files and threads can be measured.
"""

import contextlib
import multiprocessing
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from examples import LARGE, PLAIN
from listener_process import ENGINE, SECRET, State, serve
from mutate import hostile_bytes, msgpack

from harness import waiting
from harness.channels import plain_sockets
from vllm_ascend_pd.core.protocol import (
    PROTOCOL_VERSION,
    AskTicket,
    Describe,
    GrantRefused,
    Message,
    TicketRefused,
    decode,
)
from vllm_ascend_pd.transport.curve import side_channel_keys
from vllm_ascend_pd.transport.side_channel import _HANDSHAKE_S, SideChannelClient, SideChannelError

pytestmark = pytest.mark.timeout(3600)  # the long form

PATIENCE_S = 60.0
MAX_GROWTH_BYTES = 32 << 20
"""Of resident memory."""
MAX_GROWTH_UNREAD_BYTES = 40 << 20
"""The same while 10 connections read nothing: 8 descriptions for each, of 0.3 MB, or 1024 short answers."""

QUESTIONS: dict[str, tuple[Message, Message]] = {
    "ranks": (Describe("decode-0"), GrantRefused("decode-0", retry=False)),
    "descriptions": (Describe("decode-0"), LARGE),
    "tickets": (AskTicket(ENGINE, "t", "0123" * 8), TicketRefused("the ticket is not known here", retry=True)),
}
"""What a peer asks, and what the listener answers, by the listener's kind."""
all_kinds = pytest.mark.parametrize("listener", QUESTIONS, indirect=True)
"""Where a listener's own messages matter. Connections are the same server's for all."""

_processes = multiprocessing.get_context("forkserver")


class Listener:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._pipe, child = _processes.Pipe()
        self._process = _processes.Process(target=serve, args=(child, kind), daemon=True)
        self._process.start()
        self.endpoint = self._take()
        self.port = int(self.endpoint.rpartition(":")[2])
        self._client = SideChannelClient()

    def _take(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the listener's process does not answer"
        return self._pipe.recv()

    def state(self) -> State:
        self._pipe.send("state")
        return self._take()

    def serves(self, client: SideChannelClient | None = None) -> None:
        """A peer gets its answer. It repeats its request, as peers do."""
        question, right = QUESTIONS[self.kind]
        answers: queue.Queue[Message | SideChannelError] = queue.Queue()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            (client or self._client).request(self.endpoint, question, 5.0, answers.put)
            answer = answers.get(timeout=PATIENCE_S)
            if not isinstance(answer, SideChannelError):
                assert answer == right
                return
            assert time.monotonic() < deadline, answer

    def serves_newcomers(self) -> None:
        client = SideChannelClient()
        try:
            self.serves(client)
        finally:
            client.close()

    def end(self) -> tuple[int, int]:
        self._client.close()
        self._pipe.send("end")
        left = self._take()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0
        return left


@pytest.fixture(params=["ranks"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """Yields a listener. Afterwards it has as many files and threads as before and no more memory, and frees all when
    it closes.
    """
    listener = Listener(request.param)
    listener.serves()
    listener.serves_newcomers()
    before = wait_for(listener.state, lambda state: state.files <= listener.state().files)
    yield listener
    listener.serves()
    listener.serves_newcomers()
    after = wait_for(  # questions that had come by then are still being answered
        listener.state, lambda state: state.files <= before.files and state.rss - before.rss < MAX_GROWTH_BYTES
    )
    assert after.threads == before.threads
    print(
        f"{request.node.name}: {after.rejected} messages rejected, {after.refused} connections refused, "
        f"{before.rss >> 20} -> {after.rss >> 20} MiB, {before.files} -> {after.files} files"
    )
    threads, files = listener.end()
    assert threads == 1
    assert files <= before.files


wait_for = partial(waiting.wait_for, timeout_s=PATIENCE_S, every_s=0.05)


@contextlib.contextmanager
def attack(kind: str, port: int, count: int, seed: int = 0) -> Iterator[Callable[[], int]]:
    """Runs an attacker. The yielded function ends it, or waits until it is done, and returns how often it attacked."""
    command = [sys.executable, str(Path(__file__).with_name("attackers.py")), kind, str(port), str(count), str(seed)]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert stranger.stdin is not None
    assert stranger.stdout is not None

    def finish(wait: bool = False) -> int:
        if not wait:
            stranger.stdin.close()
        word, number = stranger.stdout.readline().split()
        assert word == "done"
        return int(number)

    try:
        assert stranger.stdout.readline() == "ready\n"
        yield finish
    finally:
        stranger.kill()
        stranger.wait()
        for pipe in (stranger.stdin, stranger.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def many(inputs: int, per_20000: int) -> int:
    """How often to attack. The long form is bounded by the ports of a host."""
    return per_20000 * max(1, min(10, inputs // 20_000))


@pytest.mark.parametrize("kind", ["scan", "greetings"])
def test_strangers_that_connect_and_leave(listener: Listener, kind: str, inputs: int, fuzz_seed: int) -> None:
    count = many(inputs, 1500)
    with attack(kind, listener.port, count, fuzz_seed) as finish:
        for _ in range(5):
            listener.serves()
            listener.serves_newcomers()
        assert finish(wait=True) == count


@pytest.mark.parametrize("kind", ["flood", "drip"])
def test_connections_without_a_handshake_are_closed(listener: Listener, kind: str) -> None:
    """Each is replaced by another when it is closed, so there are as many new ones after the handshake's time."""
    with attack(kind, listener.port, 500) as finish:
        ends = time.monotonic() + 1.5 * _HANDSHAKE_S
        while time.monotonic() < ends:
            listener.serves()
            listener.serves_newcomers()
            assert listener.state().files < 2 * 500
            time.sleep(0.1)
        made = finish()
    assert made >= 2 * 500


@all_kinds
def test_messages_of_a_hundred_megabytes(listener: Listener, inputs: int) -> None:
    """Messages announce that length."""
    before = listener.state()
    with attack("announced", listener.port, many(inputs, 20)) as finish:
        listener.serves()
        listener.serves_newcomers()
        assert finish(wait=True) == many(inputs, 20)
    assert listener.state().rss - before.rss < MAX_GROWTH_BYTES


@all_kinds
def test_endless_messages_of_strangers(listener: Listener, inputs: int) -> None:
    """They are refused before the first message: their addresses are not on the list."""
    before = listener.state()
    with attack("endless", listener.port, 1000) as finish:
        for _ in range(10 * many(inputs, 1)):
            listener.serves()
            assert listener.state().rss - before.rss < MAX_GROWTH_BYTES
            time.sleep(0.1)
        listener.serves_newcomers()
        assert finish() > 0
    after = listener.state()
    assert after.refused > before.refused
    assert after.rejected == before.rejected, "none came as far as a message"


@pytest.mark.parametrize(
    ("listener", "kind"), [("ranks", "deaf"), ("descriptions", "deaf"), ("ranks", "deaf_babble")], indirect=["listener"]
)
def test_peers_that_never_read_their_answers(listener: Listener, kind: str) -> None:
    before = listener.state()
    with attack(kind, listener.port, 10) as finish:
        full = wait_for(listener.state, lambda state: state.dropped > 2_000)
        assert full.rss - before.rss < MAX_GROWTH_UNREAD_BYTES
        for _ in range(5):
            listener.serves()
            listener.serves_newcomers()
        made = finish()
    print(
        f"{made} questions of 10 connections, {full.dropped} answers dropped, +{(full.rss - before.rss) >> 20} MiB then"
    )


@all_kinds
def test_messages_that_cannot_be_read(listener: Listener, inputs: int, fuzz_seed: int) -> None:
    """The listener answers each of them, so none is lost, and counts them."""
    count = many(inputs, 2000)
    valid = tuple([PROTOCOL_VERSION, n, message] for n, message in enumerate(PLAIN))
    batch = 1 if listener.kind == "descriptions" else 100  # descriptions' answers wait for few
    before = listener.state()
    unread = unreadable = 0
    with plain_sockets() as make:
        dealer = make(zmq.DEALER, listener.endpoint)
        for number in range(count):
            data = hostile_bytes(fuzz_seed, number, valid, msgpack)[:60_000]
            parts = [data] if number % 20 else [b"", data]
            dealer.send_multipart(parts)
            unreadable += _is_unreadable(data) or len(parts) > 1
            unread += 1
            if unread == batch or number == count - 1:
                for _ in range(unread):
                    decode(dealer.recv())
                unread = 0
                if number % 1000 == 99:
                    listener.serves()
    after = listener.state()
    assert after.rejected - before.rejected == unreadable > count // 2


def test_strangers_that_claim_identities_which_libzmq_gives_out() -> None:
    """libzmq ends a process whose next automatic identity is taken. With keys it asks for them before it looks at the
    identity, so strangers end nothing, even if they know the listener's public key.
    """
    listener = Listener("keyed")
    peer = SideChannelClient(secret=SECRET)
    try:
        taken = identity_of(listener, peer)
        assert taken[0] == 0, "an automatic one"
        with zmq.Context() as context:
            public, secret = zmq.curve_keypair()
            claims = [context.socket(zmq.DEALER) for _ in range(100)]
            for number, claim in enumerate(claims, 1):
                claim.setsockopt(zmq.LINGER, 0)
                claim.setsockopt(zmq.ROUTING_ID, b"\0" + (int.from_bytes(taken[1:], "big") + number).to_bytes(4, "big"))
                claim.setsockopt(zmq.CURVE_SERVERKEY, side_channel_keys(SECRET)[0]._server_public)
                claim.setsockopt(zmq.CURVE_PUBLICKEY, public)
                claim.setsockopt(zmq.CURVE_SECRETKEY, secret)
                claim.connect(listener.endpoint)
            wait_for(listener.state, lambda state: state.refused >= len(claims))
            newcomer = SideChannelClient(secret=SECRET)
            try:
                assert int.from_bytes(identity_of(listener, newcomer), "big") == int.from_bytes(taken, "big") + 1
            finally:
                newcomer.close()
            context.destroy(linger=0)
        assert identity_of(listener, peer) == taken
    finally:
        peer.close()
        threads, _ = listener.end()
    assert threads == 1


def identity_of(listener: Listener, client: SideChannelClient) -> bytes:
    answers: queue.Queue[Message | SideChannelError] = queue.Queue()
    client.request(listener.endpoint, Describe("decode-0"), PATIENCE_S, answers.put)
    answer = answers.get(timeout=2 * PATIENCE_S)
    assert isinstance(answer, GrantRefused), answer
    return bytes.fromhex(answer.reason)


def _is_unreadable(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return True
    return False
