# SPDX-License-Identifier: Apache-2.0
"""A metaserver in place of the proxy's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm_ascend_pd.core.protocol import METASERVER_PATH

Answer = Callable[[BaseHTTPRequestHandler, bytes], object]
"""Gets a post, and its body, and answers it."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # with more connections at once than fit, clients' kernels wait a second


@contextmanager
def metaserver(answer: Answer) -> Iterator[str]:
    """On this host; treats every ticket in one way. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{METASERVER_PATH}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
