# SPDX-License-Identifier: Apache-2.0
"""The relays of the fault injection do what their faults say, and nothing else."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from harness.channels import HOST, PATIENCE_S, ask, assert_works, echo
from harness.wire import Fault, Relay, Rule, SideChannel, Wire
from harness.zmtp import Stream
from vllm_ascend_pd.core.protocol import Describe, GrantRefused
from vllm_ascend_pd.transport import loop
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError, SideChannelServer


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def echoing() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    with socket.create_server((HOST, 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection((HOST, relay.port), PATIENCE_S)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def test_a_relay(wire: Wire, echoing: int) -> None:
    relay = Relay(wire, echoing)
    data = bytes(range(256)) * 4096
    with connect(relay) as one:
        threading.Thread(target=one.sendall, args=(data,)).start()
        assert receive(one, len(data)) == data
        with relay.broken(Fault(stall=True)):
            one.sendall(b"later")
            one.settimeout(0.3)
            with pytest.raises(TimeoutError):
                one.recv(5)
        one.settimeout(PATIENCE_S)
        assert receive(one, 5) == b"later"
        with relay.broken(Fault(refuse=True)):
            with pytest.raises(ConnectionResetError):
                one.recv(1)
            with pytest.raises(ConnectionResetError), connect(relay) as refused:
                refused.recv(1)
    with relay.broken(Fault(answer=b"nonsense")), connect(relay) as other:
        other.sendall(b"hello")
        assert receive(other, 100) == b"nonsense"
    with relay.broken(Fault(cut_after=1000)), connect(relay) as cut:
        cut.sendall(data[:999])
        assert receive(cut, 999) == data[:999]
        cut.sendall(b"xx")
        with pytest.raises(ConnectionResetError):
            receive(cut, 100)
    with connect(relay) as healthy:
        healthy.sendall(b"well")
        assert receive(healthy, 4) == b"well"
    assert relay.connections == 5


@pytest.fixture
def channel(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> SideChannel:
    """Clients made from now on connect through it."""
    import zmq

    made = SideChannel(wire)
    make = loop.Loop._socket

    def make_proxied(self: loop.Loop, kind: int) -> "zmq.Socket[bytes]":
        new = make(self, kind)
        if kind == zmq.DEALER:
            new.setsockopt(zmq.SOCKS_PROXY, f"{HOST}:{made.port}".encode())
        return new

    monkeypatch.setattr(loop.Loop, "_socket", make_proxied)
    return made


def test_messages_of_a_side_channel(channel: SideChannel) -> None:
    heard: list[str] = []

    def handle(message: Describe, peer: object) -> GrantRefused:
        heard.append(message.engine_id)
        return echo(message, peer)  # type: ignore[arg-type,return-value]

    server, client = SideChannelServer(HOST, 0, handle), SideChannelClient()  # type: ignore[arg-type]
    try:
        assert_works(client, server)
        with channel.ruled(Rule(Describe, "lose", times=1)):
            assert isinstance(ask(client, server.endpoint, "lost", timeout_s=0.5), SideChannelError)
            assert ask(client, server.endpoint, "next") == GrantRefused("next", retry=False)
        with channel.ruled(Rule(GrantRefused, "lose", times=1)):
            assert isinstance(ask(client, server.endpoint, "unanswered", timeout_s=0.5), SideChannelError)
        with channel.ruled(Rule(Describe, "twice")):
            assert ask(client, server.endpoint, "twice") == GrantRefused("twice", retry=False)
        with channel.ruled(Rule(Describe, "hold")):
            assert isinstance(ask(client, server.endpoint, "held", timeout_s=0.3), SideChannelError)
            assert "held" not in heard
        assert ask(client, server.endpoint, "behind") == GrantRefused("behind", retry=False)
        with channel.ruled(Rule(Describe, "reset", times=1)):
            assert isinstance(ask(client, server.endpoint, "cut", timeout_s=0.5), SideChannelError)
        channel.record()
        assert ask(client, server.endpoint, "again") == GrantRefused("again", retry=False)
        assert channel.replay() == 1
        assert_works(client, server)
    finally:
        client.close()
        server.close()
    said = ["next", "unanswered", "twice", "twice", "held", "behind", "again", "again"]
    assert [text for text in heard if text != "still there"] == said
    assert channel.seen["Describe"] == 10


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_zmtp_is_cut_into_its_parts_however_it_arrives(size: int) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)
    command = b"\x04\x05READY"
    short, long = b"\x00\x02hi", b"\x02" + (300).to_bytes(8, "big") + b"x" * 300
    many = b"\x01\x01a" + b"\x00\x01b"
    stream, parts = Stream(), []
    data = greeting + command + short + long + many + b"\x00\x05inc"
    for start in range(0, len(data), size):
        parts += stream.feed(data[start : start + size])
    assert b"".join(part.raw for part in parts) == data[:-5]
    assert [part for part in parts if part.payload is not None] == [(short, b"hi"), (long, b"x" * 300), (many, b"b")]
