# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vllm-ascend's example of a layerwise proxy (v0.23.0), which speaks its wire format and fails as it
does: whatever goes wrong, decode's ticket is answered 200, and the client 200 with what there is of an answer. It may
send what PyMotor sends (MindIE-PyMotor, `pd_protocol.py`) instead.

It does not ask again for what vllm-ascend's recompute scheduler has ended: ours ends no request so.
"""

import copy
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.http_server import Handler, serving
from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.core.protocol import METASERVER_PATH

_API_IDS = {"/v1/completions": "cmpl-{}-0", "/v1/chat/completions": "chatcmpl-{}"}
"""Under which id a ticket is expected: of a list of prompts only the first one's is."""
_RETRY_DELAY_S = 0.001


@dataclass
class LayerwiseProxy:
    """`attempts`: how often a request is sent to decode, and a ticket to prefill, until one answers with a 2xx."""

    prefill: str
    decode: str
    attempts: int
    like_pymotor: bool = False
    """As PyMotor in its profile "trigger": an attempt's number in the metaserver's URL, the request's id in the body,
    and other `do_` keys for prefill."""
    url: str = ""
    tickets: list[dict[str, Any]] = field(default_factory=list)
    """As decode posted them."""
    swallowed: list[str] = field(default_factory=list)
    """What the real one only logs: failed prefills, then failed answers."""
    _waiting: dict[str, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=None, **PLAIN_HTTP))

    def serve_client(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Decode's answer; nothing if it gave none."""
        request_id = str(uuid.uuid4())
        self._waiting[_API_IDS[path].format(request_id)] = (request_id, path, copy.deepcopy(body))
        metaserver = self.url + METASERVER_PATH + ("?attempt=1" if self.like_pymotor else "")
        transfer = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": metaserver}
        yield from self._ask_often(path, {**body, "kv_transfer_params": transfer}, request_id)

    def _ask_often(self, path: str, body: dict[str, Any], request_id: str) -> Iterator[bytes]:
        for attempt in range(self.attempts):
            try:
                yield from self._ask_decode(path, body, request_id)
                return
            except httpx.HTTPError as error:
                self.swallowed.append(f"decode: {error}")
                time.sleep(_RETRY_DELAY_S * 2**attempt)

    def serve_ticket(self, ticket: dict[str, Any]) -> None:
        """Returns when prefill has ended, well or not. Raises KeyError for a request that it does not know."""
        self.tickets.append(ticket)
        request_id, path, body = self._waiting[ticket["request_id"]]
        asked = {**body, "kv_transfer_params": ticket, "stream": False, "max_tokens": 1, "min_tokens": 1}
        if self.like_pymotor:
            turned = {**ticket, "do_remote_decode": True, "do_remote_prefill": False}
            turned.pop("metaserver", None)
            asked["kv_transfer_params"] = turned
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        asked.pop("stream_options", None)
        for attempt in range(self.attempts):
            try:
                self._http.post(self.prefill + path, **self._request(asked, request_id)).raise_for_status()
                return
            except httpx.HTTPError as error:
                self.swallowed.append(f"prefill: {error}")
                time.sleep(_RETRY_DELAY_S * 2**attempt)

    def _ask_decode(self, path: str, body: dict[str, Any], request_id: str) -> Iterator[bytes]:
        with self._http.stream("POST", self.decode + path, **self._request(body, request_id)) as response:
            response.raise_for_status()
            yield from response.iter_bytes()

    def _request(self, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        if self.like_pymotor:
            return {"json": {**body, "request_id": request_id}}
        return {"json": body, "headers": {"Authorization": "Bearer None", "X-Request-Id": request_id}}


@contextmanager
def layerwise_proxy(
    prefill: str, decode: str, attempts: int = 3, like_pymotor: bool = False
) -> Iterator[LayerwiseProxy]:
    """Between two running engines, given by their URLs."""
    proxy = LayerwiseProxy(prefill, decode, attempts, like_pymotor)

    class Requests(Handler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.partition("?")[0] == METASERVER_PATH:
                try:
                    proxy.serve_ticket(body)
                    self.begin(200, "application/json")
                    self.wfile.write(b"null")
                except KeyError:
                    self.begin(500, "text/plain")
                    self.wfile.write(b"Internal Server Error")
            elif self.path not in _API_IDS:
                self.begin(404, "application/json")
                self.wfile.write(b'{"detail":"Not Found"}')
            else:
                self.begin(200, "text/event-stream" if body.get("stream") else "application/json")
                for chunk in proxy.serve_client(self.path, body):
                    self.wfile.write(chunk)

    try:
        with serving(Requests) as proxy.url:
            yield proxy
    finally:
        proxy._http.close()
