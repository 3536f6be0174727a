# SPDX-License-Identifier: Apache-2.0
"""Attacks on the engines' side: who attacks what, with what. `ROWS` has all of them.

An attack runs in a process of its own, against a subject (`harness/attacked.py`) or a sink that takes the same bytes
and does nothing with them.
"""

import ctypes
import multiprocessing
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from harness.zmtp import GREETING, ready
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.protocol import (
    PROTOCOL_VERSION,
    Acknowledged,
    Describe,
    GrantRequest,
    OfferTicket,
    ReleasePrompt,
    WriterId,
    decode,
    encode,
)
from vllm_ascend_pd.core.signing import signed
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.transport.curve import Guard, side_channel_keys
from vllm_ascend_pd.transport.secret_files import cluster_secret

HOST = "127.0.0.1"
STRANGER = "127.0.0.2"
"""Where attackers connect from."""
ENGINE = "prefill-0"
"""The engine that takes tickets."""
PATIENCE_S = 30.0
UNANSWERED_S = 3.0
"""A socket that hears nothing for so long was refused."""
AT_ONCE = 16
"""Messages of an attacker that have no answer yet."""
CLAIMS, STARTS = 12, 8
"""Identities that are claimed from each number on at which libzmq's may begin."""
PART = 32768
GREETING_BYTES = 107
"""Of a DEALER or a ROUTER, with the end of its handshake."""
NEEDED = ("group", "order", "dtype", "block_size", "block_stride", "heads", "total_heads", "head_bytes")
"""Fields of a geometry that must be there."""

processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Target:
    """What an attacker knows. `secret_file`: the cluster's, of one who has it."""

    endpoint: str
    secret_file: str | None = None
    ticket: Ticket | None = None

    @property
    def address(self) -> tuple[str, int]:
        return HOST, int(self.endpoint.rpartition(":")[2])


Attack = Callable[[Target], Iterator[int]]
"""Yields how many messages have been sent so far."""
Answer = Callable[[Any], bytes]
"""What a made-up decode engine answers to `Describe`. It gets a true description, as plain data."""


def read(secret_file: str | None) -> Any:
    """Returns the cluster's secret; None if there is none."""
    return None if secret_file is None else cluster_secret(secret_file)


def sign(ticket: Ticket, secret_file: str | None) -> Ticket:
    """Signs a ticket as decode does, if the cluster has a secret."""
    secret = read(secret_file)
    return ticket if secret is None else signed(ticket, secret, int(time.time()) + 600)


# Attacks of who connects.


def identities(target: Target) -> Iterator[int]:
    """Claims the identities that libzmq would give to others next. Its counter begins at two numbers of C's `rand`."""
    libc = ctypes.CDLL(None)
    libc.srand(1)  # as in a process that never seeds it
    drawn = [libc.rand() for _ in range(STARTS + 1)]
    starts = [low | high << 31 for low, high in pairwise(drawn)]
    claimed = [b"\0" + struct.pack(">I", (start + n) & 0xFFFFFFFF) for start in starts for n in range(CLAIMS)]
    connect = _plain_peer if target.secret_file is None else _peer_with_secret
    context = zmq.Context()
    held = []
    try:
        for identity in claimed:
            with suppress(OSError, zmq.ZMQError):  # refused
                held.append(connect(target, identity, context))
        with suppress(OSError, zmq.ZMQError):  # the other side is gone
            for _ in range(CLAIMS):
                held.append(connect(target, b"", context))
        while True:
            yield len(claimed)
            time.sleep(0.05)
    finally:
        for each in held:
            each.close()
        context.destroy(linger=0)


def _plain_peer(target: Target, identity: bytes, _: object) -> Any:
    """A connection whose handshake is over, or was refused."""
    connection = socket.create_connection(target.address, UNANSWERED_S, (STRANGER, 0))
    connection.sendall(GREETING + ready("DEALER", identity))
    answer = b""
    while len(answer) <= len(GREETING) and (piece := connection.recv(4096)):
        answer += piece
    return connection


def _peer_with_secret(target: Target, identity: bytes, context: "zmq.Context[Any]") -> Any:
    dealer = _dealer(context, target, identity)
    dealer.send(b"")
    dealer.recv()
    return dealer


def _dealer(context: "zmq.Context[Any]", target: Target, identity: bytes = b"") -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, int(UNANSWERED_S * 1000))
    dealer.setsockopt(zmq.SNDTIMEO, int(UNANSWERED_S * 1000))
    if identity:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
    if target.secret_file is not None:
        side_channel_keys(read(target.secret_file))[0].protect_client(dealer)
    dealer.connect(target.endpoint.replace("//", f"//{STRANGER}:0;"))
    return dealer


def _exchanged(target: Target, frames: Iterable[bytes]) -> Iterator[int]:
    """Sends frames, and takes an answer for each."""
    context = zmq.Context()
    try:
        dealer = _dealer(context, target)
        unanswered = 0
        with suppress(zmq.Again):  # refused, or the other side is gone
            for number, frame in enumerate(frames, 1):
                dealer.send(frame)
                unanswered += 1
                if unanswered == AT_ONCE:
                    dealer.recv()
                    unanswered -= 1
                yield number
            for _ in range(unanswered):
                dealer.recv()
    finally:
        context.destroy(linger=0)


def _packed(message: Any) -> bytes:
    """A frame with any content."""
    return msgspec.msgpack.encode([PROTOCOL_VERSION, 1, message, PROTOCOL_VERSION])


def _offer(target: Target, **fields: object) -> OfferTicket:
    """With the signature of another ticket, if there is one."""
    assert target.ticket is not None
    made = msgspec.structs.replace(target.ticket, ticket_id=secrets.token_hex(16), **fields)
    return OfferTicket(ENGINE, "made-up", made)


def empty_lists(target: Target) -> Iterator[int]:
    """Offers of a megabyte, with a million lists of blocks that name none."""
    made = msgspec.to_builtins(_offer(target))
    made["ticket"]["remote_block_ids"] = [[]] * 1_000_000
    return _exchanged(target, [_packed(made)] * 60)


def long_offers(target: Target) -> Iterator[int]:
    """Offers of a megabyte, with as many blocks as that holds."""
    blocks, sizes = [[7] * 250_000] * 4, [16] * 4
    frames = (encode(1, _offer(target, remote_block_ids=blocks, remote_block_size=sizes)) for _ in range(60))
    return _exchanged(target, frames)


def many_offers(target: Target) -> Iterator[int]:
    """More offers than may wait, for prompts that nobody has asked for. They are signed by one who can."""
    made = (_offer(target) for _ in range(1500))
    offers = (msgspec.structs.replace(each, ticket=sign(each.ticket, target.secret_file)) for each in made)
    return _exchanged(target, (encode(1, each) for each in offers))


def releases(target: Target) -> Iterator[int]:
    """More releases than may wait, of prompts that nobody has asked for. Nobody signs them."""
    made = (ReleasePrompt(ENGINE, "made-up", "", secrets.token_hex(16), 48) for _ in range(2000))
    return _exchanged(target, (encode(1, each) for each in made))


def ever_new_shapes(target: Target) -> Iterator[int]:
    """Asks for grants for one ticket, each time as a prefill engine of another shape."""
    assert target.ticket is not None
    ticket = target.ticket
    writer = WriterId("made-up", 0, 0)
    asked = (
        GrantRequest(ticket.ticket_id, ticket.digest(), writer, sharding(1024, 256, interleave), (), 0.0)
        for interleave in range(1, 400)
    )
    return _exchanged(target, (encode(1, each) for each in asked))


def unknown_tickets(target: Target) -> Iterator[int]:
    """Asks for grants for tickets that were never issued."""
    writer = WriterId("made-up", 0, 0)
    asked = (
        GrantRequest(secrets.token_hex(16), "", writer, sharding(1024), tuple(range(8000)), 0.0) for _ in range(1000)
    )
    return _exchanged(target, (encode(1, each) for each in asked))


# Attacks of whom an engine connects to.


def too_many_ranks(right: Any) -> bytes:
    """40,960 ranks, at as many addresses."""
    return _with(right, ranks=40_960, tp=1024, pp=40)


def most_ranks(right: Any) -> bytes:
    """As many ranks as an engine may have, of a model that does not fit."""
    return _with(right, ranks=4096, tp=1024, pp=4, model="another")


def too_many_geometries(right: Any) -> bytes:
    """55,000 geometries, all different."""
    return _with(right, geometries=55_000)


def most_geometries(right: Any) -> bytes:
    """As many geometries as a rank may have, all different."""
    return _with(right, geometries=1024)


def same(number: int) -> dict[str, object]:
    """None: the ticket is as an honest one."""
    return {}


def new_shapes(number: int) -> dict[str, object]:
    """Fields of a ticket of 1,024 ranks, in a shape of its own."""
    return {"remote_tp_size": 1024, "remote_dcp_size": 2, "remote_interleave_size": number + 1}


def _with(right: Any, ranks: int = 1, geometries: int = 0, **fields: object) -> bytes:
    first = right["ranks"][0]
    caches = first["caches"]
    if geometries:
        needed = {name: caches["geometries"][0][name] for name in NEEDED}
        made = [{**needed, "block_size": n + 1} for n in range(geometries)]
        caches = {**caches, "geometries": [*caches["geometries"], *made][:geometries]}
    elif ranks > 1:
        caches = {"tensors": [], "geometries": []}
    tp = int(str(fields.get("tp", 1)))
    addresses = (f"127.{n >> 8 & 255}.{n & 255}.9:9" for n in range(256, 256 + ranks))
    described = [
        {**first, "pp_rank": n // tp, "tp_rank": n % tp, "control": f"tcp://{at}", "session": at, "caches": caches}
        for n, at in enumerate(addresses)
    ]
    body = {**right, **fields, "ranks": described if ranks > 1 else [{**first, "caches": caches}]}
    return msgspec.msgpack.encode(body)


@dataclass(frozen=True)
class Row:
    """An attack, and on what."""

    name: str
    # What the attacker has: `NETWORK`, `TICKET` or `SECRET`.
    who: str
    # The subject: "tickets", "client", "decode rank", "prefill rank" or "model of a prefill rank".
    against: str
    # Of who connects. None: the engine connects to the attacker.
    attack: Attack | None = None
    # How the attacker describes itself then. None: by a message that does not end.
    answer: Answer | None = None
    # What a made-up ticket has that names the attacker, by its number.
    ticket: Callable[[int], dict[str, object]] = same
    # Whether the attacked engine has the secret.
    engine_has_secret: bool = True
    # Whether the attack is on ZMQ's handshake, and sends no message.
    is_on_connections: bool = False

    @property
    def ends_in_handshake(self) -> bool:
        """Whether the attacker never sends a message."""
        return self.attack is None and self.answer is None and self.engine_has_secret

    @property
    def ends(self) -> bool:
        """Whether the attack is over when all its messages are answered."""
        return self.attack is not None and not self.is_on_connections


NETWORK, TICKET, SECRET = "nothing", "a valid ticket", "the secret"

_ON_RANKS = [
    Row("400 shapes of prefill for a ticket", TICKET, "decode rank", ever_new_shapes, engine_has_secret=False),
    Row("1,000 grants for no ticket", NETWORK, "decode rank", unknown_tickets, engine_has_secret=False),
    Row("a description of 40,960 ranks", NETWORK, "prefill rank", answer=too_many_ranks, engine_has_secret=False),
    Row("a description of 4,096 ranks", NETWORK, "prefill rank", answer=most_ranks, engine_has_secret=False),
    Row(
        "a description of 55,000 geometries",
        NETWORK,
        "prefill rank",
        answer=too_many_geometries,
        engine_has_secret=False,
    ),
    Row("a description of 1,024 geometries", NETWORK, "prefill rank", answer=most_geometries, engine_has_secret=False),
    Row(
        "tickets of ever new shapes",
        NETWORK,
        "model of a prefill rank",
        answer=most_ranks,
        ticket=new_shapes,
        engine_has_secret=False,
    ),
]

ROWS = [
    Row("100 forged identities", NETWORK, "tickets", identities, is_on_connections=True),
    Row("an endless message of whom it connects to", NETWORK, "client"),
    Row("offers of a million empty lists", NETWORK, "tickets", empty_lists, engine_has_secret=False),
    Row("offers of a million empty lists", SECRET, "tickets", empty_lists),
    Row("offers of a million blocks", NETWORK, "tickets", long_offers, engine_has_secret=False),
    Row("offers of a million blocks, not signed", SECRET, "tickets", long_offers),
    Row("1,500 offers that wait", NETWORK, "tickets", many_offers, engine_has_secret=False),
    Row("1,500 offers that wait", SECRET, "tickets", many_offers),
    Row("2,000 releases that wait", NETWORK, "tickets", releases, engine_has_secret=False),
    Row("2,000 releases that wait", SECRET, "tickets", releases),
    *_ON_RANKS,
    *(replace(row, who=SECRET, engine_has_secret=True) for row in _ON_RANKS),
]


# Processes.


class Program:
    """A process at the other end of a pipe."""

    def __init__(self, program: Callable[..., None], *args: Any) -> None:
        self._pipe, child = processes.Pipe()
        self.process = processes.Process(target=program, args=(child, *args), daemon=True)
        self.process.start()
        child.close()
        self.first = self._take()
        """What it says when it has begun."""

    def _take(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), f"{type(self).__name__} does not answer"
        return self._pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Attacker(Program):
    """A process that attacks."""

    @property
    def is_done(self) -> bool:
        return self._pipe.poll()

    def again(self) -> None:
        """Tells a sink to ask again."""
        self._pipe.send("again")

    def finish(self) -> int:
        """Ends the attack. Returns how many messages it has sent."""
        with suppress(OSError):
            self._pipe.send("end")
        return int(self._take())


@contextmanager
def running(program: Callable[..., None], *args: Any) -> Iterator[Attacker]:
    attacker = Attacker(program, *args)
    try:
        yield attacker
    finally:
        attacker.close()


def attack(pipe: Connection, how: Attack, target: Target) -> None:
    """The program of an attacker that connects."""
    numbers = how(target)
    sent = next(numbers, 0)
    pipe.send("begins")
    while not pipe.poll() and (more := next(numbers, None)) is not None:
        sent = more
    pipe.send(sent)
    pipe.recv()


def _answer_all(pipe: Connection, secret_file: str | None, answer: Callable[[bytes], bytes]) -> None:
    """Takes whatever connects, and answers each message. Says its port first, and in the end how many it answered."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    guard = Guard(context, router, read(secret_file), AnyHost())
    pipe.send(router.bind_to_random_port(f"tcp://{HOST}"))
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(guard.socket, zmq.POLLIN)
    answered = 0
    while not pipe.poll():
        readable = dict(poller.poll(50))
        guard.attend()
        if router in readable:
            peer, frame = router.recv_multipart()
            router.send_multipart([peer, answer(frame)])
            answered += 1
    pipe.send(answered)
    context.destroy(linger=0)


def describe_falsely(pipe: Connection, answer: Answer, right: Any, secret_file: str | None) -> None:
    """The program of a decode engine that describes itself falsely."""
    body = msgspec.Raw(answer(right))

    def described(frame: bytes) -> bytes:
        seq, _ = decode(frame)
        return msgspec.msgpack.encode([PROTOCOL_VERSION, seq, body])

    _answer_all(pipe, secret_file, described)


def answer_endlessly(pipe: Connection) -> None:
    """The program of a peer that sends a message of ever more parts, as fast as it is read. Says its port first."""
    listener = socket.create_server((HOST, 0))
    pipe.send(listener.getsockname()[1])
    sent = 0
    part = b"\x03" + struct.pack(">Q", PART) + b"x" * PART

    def send(connection: socket.socket) -> None:
        nonlocal sent
        with suppress(OSError):
            connection.sendall(GREETING + ready("ROUTER"))
            if len(connection.recv(GREETING_BYTES, socket.MSG_WAITALL)) < GREETING_BYTES:
                return  # it speaks only CURVE
            while True:
                connection.sendall(part)
                sent += 1

    def accept() -> None:
        while True:
            threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    pipe.recv()
    pipe.send(sent)


# Sinks, which take the place of a subject.


def take_messages(pipe: Connection, secret_file: str | None) -> None:
    """Answers each message as shortly as can be."""
    done = encode(1, Acknowledged())
    _answer_all(pipe, secret_file, lambda frame: done)


def take_bytes(pipe: Connection, port: int | None = None) -> None:
    """Takes bytes on plain connections: from who connects, or from who listens on `port`. Says its port first."""

    def drain(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(GREETING + ready("ROUTER" if port is None else "DEALER"))
            while connection.recv(1 << 20):
                pass

    if port is not None:
        threading.Thread(target=drain, args=(socket.create_connection((HOST, port)),), daemon=True).start()
        pipe.send(port)
    else:
        listener = socket.create_server((HOST, 0), backlog=200)

        def accept() -> None:
            while True:
                threading.Thread(target=drain, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        pipe.send(listener.getsockname()[1])
    pipe.recv()
    pipe.send(0)


def take_descriptions(pipe: Connection, port: int, times: int, secret_file: str | None) -> None:
    """Asks who listens on `port` to describe itself, so many times whenever it is told to, and forgets the answers."""
    pipe.send("")
    question = encode(1, Describe("made-up"))
    while pipe.recv() != "end":
        for _ in _exchanged(Target(f"tcp://{HOST}:{port}", secret_file), [question] * times):
            pass
    pipe.send(0)
