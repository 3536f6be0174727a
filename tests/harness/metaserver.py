# SPDX-License-Identifier: Apache-2.0
"""A metaserver in place of the proxy's."""

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from harness.http_server import Handler, serving
from vllm_ascend_pd.core.protocol import METASERVER_PATH

Answer = Callable[[BaseHTTPRequestHandler, bytes], object]
"""Gets a post, and its body, and answers it."""


@contextmanager
def metaserver(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """On this host; treats every ticket in one way. Yields its URL."""

    class Posts(Handler):
        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

    with serving(Posts, tls) as url:
        yield f"{url}{METASERVER_PATH}"
