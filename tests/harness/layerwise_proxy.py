# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vllm-ascend's example of a layerwise proxy (v0.23.0), which speaks its wire format and fails as it
does: whatever goes wrong, decode's ticket is answered 200, and the client 200 with what there is of an answer.

vllm-ascend's recompute scheduler ends a request whose blocks it needs with the stop reason "recomputed". The proxy then
asks decode again under the same id, with the text so far behind the prompt. Prefill gets the first prompt again.
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
    url: str = ""
    tickets: list[dict[str, Any]] = field(default_factory=list)
    """As decode posted them."""
    swallowed: list[str] = field(default_factory=list)
    """What the real one only logs: failed prefills, then failed answers."""
    recomputed: int = 0
    """How often decode ended a request that it should be asked again."""
    _waiting: dict[str, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=None, **PLAIN_HTTP))

    def serve_client(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Decode's answer; nothing if it gave none. In parts, if decode ended it for its blocks."""
        request_id = str(uuid.uuid4())
        self._waiting[_API_IDS[path].format(request_id)] = (request_id, path, copy.deepcopy(body))
        transfer = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": self.url + METASERVER_PATH}
        answer = _Answer(body)
        asked: dict[str, Any] | None = body
        try:
            while asked is not None:
                again = None
                for chunk in self._ask_often(path, {**asked, "kv_transfer_params": transfer}, request_id):
                    passed = answer.passed_on(chunk)
                    if passed is None:
                        self.recomputed += 1
                        again = answer.asked_again()
                        break
                    yield passed
                asked = again
        except (TypeError, KeyError) as error:  # a prompt of token ids has no text to add to
            self.swallowed.append(f"answer: {error!r}")

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
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        asked.pop("stream_options", None)
        for attempt in range(self.attempts):
            try:
                self._http.post(self.prefill + path, json=asked, headers=_headers(request_id)).raise_for_status()
                return
            except httpx.HTTPError as error:
                self.swallowed.append(f"prefill: {error}")
                time.sleep(_RETRY_DELAY_S * 2**attempt)

    def _ask_decode(self, path: str, body: dict[str, Any], request_id: str) -> Iterator[bytes]:
        with self._http.stream("POST", self.decode + path, json=body, headers=_headers(request_id)) as response:
            response.raise_for_status()
            yield from response.iter_bytes()


@dataclass
class _Answer:
    """What the proxy knows of an answer so far."""

    body: dict[str, Any]
    """The client's request."""
    text: str = ""
    tokens: int = 0
    """Of a stream: its chunks."""
    parts: int = 0
    """How many ended as recomputed."""

    def passed_on(self, chunk: bytes) -> bytes | None:
        """What the client gets of a chunk; None for one that ends a part. Raises KeyError or TypeError as the real one
        fails."""
        try:
            read = json.loads(chunk.decode().strip().removeprefix("data: "))
        except ValueError:
            return chunk
        if not read.get("choices"):
            return chunk
        choice = read["choices"][0]
        said = [part.get("content") for part in (choice.get("delta") or {}, choice.get("message") or {})]
        self.text += next((text for text in (*said, choice.get("text")) if text), "")
        self.tokens += 1 if self.body.get("stream") else read["usage"]["completion_tokens"]
        if choice.get("stop_reason") == "recomputed":
            return None
        if self.parts == 0 or self.body.get("stream"):
            return chunk
        if "message" in choice:
            choice["message"]["content"] = self.text
        else:
            choice["text"] = self.text
        return json.dumps(read).encode()

    def asked_again(self) -> dict[str, Any]:
        """The request for the rest, with the text so far. Raises TypeError for a prompt of token ids."""
        self.parts += 1
        again = copy.deepcopy(self.body)
        if "messages" in again:
            first = again["messages"][0]
            content = first.get("content", "")
            first["content"] = (content[0]["text"] if isinstance(content, list) else content) + self.text
        else:
            again["prompt"] = again["prompt"] + self.text
        # In a stream, a part's last chunk is counted and has no token. A whole answer gets a token too many instead.
        again["max_tokens"] = self.body.get("max_tokens", 16) - self.tokens + self.parts
        return again


def _headers(request_id: str) -> dict[str, str]:
    return {"Authorization": "Bearer None", "X-Request-Id": request_id}


@contextmanager
def layerwise_proxy(prefill: str, decode: str, attempts: int = 3) -> Iterator[LayerwiseProxy]:
    """Between two running engines, given by their URLs."""
    proxy = LayerwiseProxy(prefill, decode, attempts)

    class Requests(Handler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == METASERVER_PATH:
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
