# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for stand-ins, on this host."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

HOST = "127.0.0.1"


class Handler(BaseHTTPRequestHandler):
    """Logs nothing."""

    def begin(self, status: int, content_type: str) -> None:
        """Sends an answer's head."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # with more connections at once than fit, clients' kernels wait a second


@contextmanager
def serving(handler: type[Handler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serves with `handler`. Yields the URL, without a path."""
    server = _Server((HOST, 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
