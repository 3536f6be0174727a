# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for stand-ins, on this host."""

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
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serves with `handler`. Yields the URL, without a path."""
    server = _Server((HOST, 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
