# SPDX-License-Identifier: Apache-2.0
"""Both ends of a side channel, and plain ZMQ sockets that behave as no end of it would."""

import contextlib
import queue
from collections.abc import Callable, Iterator

import zmq

from vllm_ascend_pd.core.protocol import Describe, GrantRefused, Message
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.secret_files import new_secret
from vllm_ascend_pd.transport.side_channel import (
    ClientConnection,
    SideChannelClient,
    SideChannelError,
    SideChannelServer,
)

HOST = "127.0.0.1"
PATIENCE_S = 20.0
"""For what is certain to happen, on a machine however busy."""

Answer = Message | SideChannelError
MakeSocket = Callable[..., "zmq.Socket[bytes]"]


def echo(message: Message, peer: ClientConnection) -> Message:
    """A server's handler."""
    assert isinstance(message, Describe)
    return GrantRefused(message.engine_id, retry=False)


def ask(client: SideChannelClient, endpoint: str, text: str = "hello", timeout_s: float = PATIENCE_S) -> Answer:
    answers: queue.Queue[Answer] = queue.Queue()
    client.request(endpoint, Describe(text), timeout_s, answers.put)
    return answers.get(timeout=PATIENCE_S)


def assert_works(client: SideChannelClient, server: SideChannelServer) -> None:
    assert ask(client, server.endpoint, "still there") == GrantRefused("still there", retry=False)


def random_secret() -> Secret:
    return Secret([new_secret().strip()])


@contextlib.contextmanager
def plain_sockets() -> Iterator[MakeSocket]:
    """A function that makes sockets of a kind: connected to an endpoint, or listening where none is given."""
    context = zmq.Context()

    def make(kind: int, endpoint: str | None = None) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        if endpoint is None:
            socket.bind(f"tcp://{HOST}:*")
        else:
            socket.connect(endpoint)
        return socket

    try:
        yield make
    finally:
        context.destroy(linger=0)


def endpoint_of(socket: "zmq.Socket[bytes]") -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
