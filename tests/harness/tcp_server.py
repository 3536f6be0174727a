# SPDX-License-Identifier: Apache-2.0
"""A TCP server that does with each connection what a test says."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Its port. Connections are served one after the other and then closed; an error on one ends that one alone."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    serve(peer)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


@contextlib.contextmanager
def unvisited() -> Iterator[int]:
    """Listens, and yields the port. Raises AssertionError at the end if anything has connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
        listener.setblocking(False)
        try:
            peer, address = listener.accept()
        except BlockingIOError:
            return
        peer.close()
        raise AssertionError(f"connected to from {address}")


def read_to_the_end(peer: socket.socket) -> None:
    """Until the other side has closed: closing with bytes unread would be a reset."""
    while peer.recv(65536):
        pass
