# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM engines: real HTTP servers that speak vLLM's wire format.

They play the decode or the prefill part of the ticket protocol and compute nothing. A test sets what they do next.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from harness.certificates import Certificate
from harness.plain_http import PLAIN_HTTP

# What vLLM answers when an engine request fails inside.
INTERNAL_ERROR = {
    "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
}
BUSY = {
    "error": {
        "message": "The engine is currently busy and cannot accept new requests.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}
"""vLLM's answer to a request for which it has no room."""
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
"""Of requests that take `kv_transfer_params`."""
OTHER_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/version")
"""Of requests that need no prefill."""


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Servers:
    """ASGI applications behind real HTTP, each in a thread of its own; all stop together."""

    def __init__(self) -> None:
        self._running: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def start(
        self,
        make_app: Callable[[str], ASGIApp],
        listener: socket.socket | None = None,
        certificate: Certificate | None = None,
    ) -> str:
        """Serves `make_app(url)` at `listener`, or on a free port of 127.0.0.1; returns the URL once it answers.
        `certificate`: for https."""
        listener = listener or socket.create_server(("127.0.0.1", 0), backlog=128)
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        tls = {"ssl_certfile": str(certificate.cert), "ssl_keyfile": str(certificate.key)} if certificate else {}
        config = uvicorn.Config(make_app(url), log_config=None, access_log=False, timeout_graceful_shutdown=1, **tls)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        self._running.append((server, thread, listener))
        deadline = time.monotonic() + 10
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        return url

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for server, _thread, _listener in self._running:
            server.should_exit = True
        for _server, thread, listener in self._running:
            thread.join(timeout=10)
            listener.close()
            assert not thread.is_alive(), "the server did not stop"


NO_OBJECT = {"error": {"message": "body: Field required", "type": "Bad Request", "param": "body", "code": 400}}
"""About a body that holds no JSON object."""


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class _Engine:
    def __init__(self) -> None:
        self.received: list[Received] = []
        self.refusal: tuple[int, dict[str, Any]] | None = None
        """Answer every request with this status and body."""
        self.page: int | None = None
        """Answer every request with this status and an HTML page."""
        self.room: int | None = None
        """As vLLM's `--max-num-queued-reqs`: how many requests it takes at a time; None: any number."""
        self.served = 0
        """Requests that it has taken."""
        self.raw_refusal: str | None = None
        """Answer every request with HTTP 500 and this."""
        self.hangs = False
        """Accept requests and never answer them."""
        self.frozen = False
        """Accept connections, and answer nothing at all."""
        self.holds = False
        """Prefill: answer no request while this is set."""
        self.most_at_once = 0
        """Requests that were answered at the same time."""
        self._at_once = 0
        self.healthy = True
        self.metrics: str | None = None
        """What `/metrics` says; None: there is none."""
        self.metrics_read = threading.Semaphore(0)
        """Released when it was said."""
        self.probed = threading.Semaphore(0)
        """Released when a health probe was answered."""
        self.working = threading.Event()
        """A request has arrived."""
        self.cancelled = threading.Event()
        """The sender of a request left before it was answered."""
        self.app = Starlette(
            routes=[
                *(Route(path, self._generate, methods=["POST"]) for path in PATHS),
                *(Route(path, self._echo, methods=["GET", "POST"]) for path in OTHER_PATHS),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        body = _object(await request.body())
        if body is None:
            return JSONResponse(NO_OBJECT, status_code=400)
        received = Received(request.url.path, dict(request.headers), body)
        self.received.append(received)
        self.working.set()
        if self.refusal is not None:
            status, body = self.refusal
            return JSONResponse(body, status_code=status)
        if self.page is not None:
            return HTMLResponse("<html><body>a gateway</body></html>", status_code=self.page)
        if self.raw_refusal is not None:
            return Response(self.raw_refusal, status_code=500)
        if self.room is not None and self._at_once >= self.room:
            return JSONResponse(BUSY, status_code=503)
        self.served += 1
        if received.body.get("stream"):
            return StreamingResponse(self._stream(received), media_type="text/event-stream")
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._unless_disconnected(request, self._answer(received))
        finally:
            self._at_once -= 1

    async def _unless_disconnected(self, request: Request, work: Awaitable[Response]) -> Response:
        """vLLM's `with_cancellation`: aborts the work when the sender leaves."""
        response = Response(status_code=499)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.cancelled.set()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            response = await work
            tasks.cancel_scope.cancel()
        return response

    async def _answer(self, received: Received) -> Response:
        raise NotImplementedError

    def _stream(self, received: Received) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def _health(self, _: Request) -> Response:
        while self.frozen:
            await anyio.sleep(0.05)
        self.probed.release()
        return Response(status_code=200 if self.healthy else 503)

    async def _echo(self, request: Request) -> Response:
        body = await request.body()
        fields = _object(body if request.method == "POST" else b"{}")
        if fields is None:
            return JSONResponse(NO_OBJECT, status_code=400)
        self.received.append(Received(request.url.path, dict(request.headers), fields))
        return Response(body or b"{}", media_type="application/json")

    async def _metrics(self, _: Request) -> Response:
        self.metrics_read.release()
        return Response(status_code=404) if self.metrics is None else Response(self.metrics)

    async def _models(self, request: Request) -> Response:
        self.received.append(Received(request.url.path, dict(request.headers), {}))
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


class PrefillEngine(_Engine):
    def __init__(self, takes: float = 0.0) -> None:
        """`takes`: seconds for a prompt."""
        super().__init__()
        self.takes = takes
        self.aborts = 0
        """How many requests to answer as vLLM does when it has aborted them."""
        self.lacks: str | None = None
        """The name of a model or adapter that it does not have."""
        self.transfer_error: str | None = None
        """Answer with a token, and with this as the reason why its KV did not reach the decode engine."""
        self.refuses_tickets = False
        """`transfer_error` is why it refuses the ticket."""
        self.held: dict[str, Any] = {"transfer_id": "t", "ticket_host": "127.0.0.1", "ticket_port": 9}
        """Where it says that it holds the prompt of an intent."""
        self.loses: set[str] | None = None
        """Answer as if all were well, and add the decode engine's id of the request, whose KV does not arrive."""

    async def _answer(self, received: Received) -> Response:
        if self.hangs or self.frozen:
            await anyio.sleep_forever()
        while self.holds:
            await anyio.sleep(0.02)
        await anyio.sleep(self.takes)
        if self.lacks is not None and received.body.get("model") == self.lacks:
            message = f"The model `{self.lacks}` does not exist."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            return JSONResponse({"error": error}, status_code=404)
        if self.aborts:
            self.aborts -= 1
            return JSONResponse({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
        ticket = received.body["kv_transfer_params"]
        assert ticket["do_remote_decode"] is True
        assert limit_of(received) == 1
        transfer = self.held if ticket.get("ticket_follows") else None
        if self.transfer_error is not None:
            transfer = {"error": self.transfer_error, **({"refused": True} if self.refuses_tickets else {})}
        if self.loses is not None:
            self.loses.add(ticket["request_id"])
        choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
        return JSONResponse({"object": "text_completion", "choices": choices, "kv_transfer_params": transfer})


class DecodeEngine(_Engine):
    """Posts one ticket per prompt and sample, waits for the metaserver's answers, then emits its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs_after_first_token = False
        self.dies_after_first_token = False
        self.hangs_when_prefill_fails = False
        """Keep waiting for KV although the metaserver has reported a failure."""
        self.needs_prefill = True
        """False: every prompt is in the prefix cache."""
        self.computes_itself = False
        """Compute prompts without a ticket if the request asks for it, or if no prefill engine is well."""
        self.intends = False
        """Post intents, whose tickets would go straight to the prefill engines that hold the prompts."""
        self.adapter: str | None = None
        """The adapter that its tickets name; "": they say that there is none. None: they say nothing."""
        self.token_ids: list[Any] | None = None
        """Every prompt's, which go with its ticket where the proxy wants them. None: it gives none."""
        self.recomputes = False
        """Answer although the metaserver has reported a failure."""
        self.fails = False
        """End with an error once all is prefilled."""
        self.waits = 0.0
        """Seconds before that."""
        self.pauses = 0.0
        """Seconds after each token of a stream."""
        self.fails_after_first_token = False
        self.breaks_off = False
        """Close the connection of a stream when all is prefilled, before its first token."""
        self.stream_room: int | None = None
        """As vLLM's `--max-num-queued-tokens`, which may refuse a stream in its first event: how many it takes at a
        time; None: any number."""
        self.most_streams = self._streams = 0
        self.first_events: list[dict[str, Any]] = []
        """Events of a stream before its first token."""
        self.lost: set[str] = set()
        """Its ids of requests whose KV does not arrive: it tells the metaserver so, and fails them."""
        self.loses_all = False
        """No KV arrives."""
        self.explains: str | None = None
        """After an answer that is an error, tell the metaserver that the transfer failed for this reason."""
        self.tickets: list[dict[str, Any]] = []
        """As posted."""
        self._reasons = httpx.Client(timeout=10, **PLAIN_HTTP)
        self.metaserver_answers: list[tuple[int, Any]] = []

    def expected_stream(self, received: Received) -> bytes:
        tokens = (event(token) for token in self._tokens(received))
        return b"".join(tokens) + b"data: [DONE]\n\n"

    async def _answer(self, received: Received) -> Response:
        if self.hangs:
            await anyio.sleep_forever()
        prefilled = await self._prefill(received)
        await anyio.sleep(self.waits)
        if not prefilled or self.fails:
            self._explain(received)
            return JSONResponse(INTERNAL_ERROR, status_code=500)
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        return JSONResponse({"object": "text_completion", "choices": self._tokens(received), "usage": usage})

    async def _stream(self, received: Received) -> AsyncIterator[bytes]:
        if self.stream_room is not None and self._streams >= self.stream_room:
            yield event(BUSY)
            yield b"data: [DONE]\n\n"
            return
        self._streams += 1
        self.most_streams = max(self.most_streams, self._streams)
        try:
            async for chunk in self._events(received):
                yield chunk
        finally:
            self._streams -= 1

    async def _events(self, received: Received) -> AsyncIterator[bytes]:
        try:
            if self.hangs:
                await anyio.sleep_forever()
            prefilled = await self._prefill(received)
            await anyio.sleep(self.waits)
            for each in self.first_events:
                yield event(each)
            if self.breaks_off:
                self._explain(received)
                raise RuntimeError("this engine dies now")
            if not prefilled or (self.fails and not self.fails_after_first_token):
                self._explain(received)
                yield event(INTERNAL_ERROR)
                yield b"data: [DONE]\n\n"
                return
            for token in self._tokens(received):
                yield event(token)
                if self.fails_after_first_token:
                    self._explain(received)
                    yield event(INTERNAL_ERROR)
                    yield b"data: [DONE]\n\n"
                    return
                if self.dies_after_first_token:
                    raise RuntimeError("this engine dies now")
                if self.hangs_after_first_token:
                    await anyio.sleep_forever()
                await anyio.sleep(self.pauses)
            yield b"data: [DONE]\n\n"
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise

    def _tokens(self, received: Received) -> list[dict[str, Any]]:
        return [{"index": i, "text": f"ÿ {i}"} for i in range(len(self._engine_request_ids(received)))]

    async def _prefill(self, received: Received) -> bool:
        """Returns whether the metaserver reports success for every ticket."""
        if not self.needs_prefill:
            return True
        transfer = received.body["kv_transfer_params"]
        assert transfer["do_remote_prefill"] is True
        assert transfer["do_remote_decode"] is False
        asked = transfer.get("who_computes") == "decode" or transfer.get("prefill_available") is False
        if self.computes_itself and asked:
            return True
        answers: list[tuple[int, Any]] = []
        async with httpx.AsyncClient(timeout=30, **PLAIN_HTTP) as client:

            async def post(ticket: dict[str, Any]) -> None:
                self.tickets.append(ticket)
                headers = {"X-KV-Recomputes": "1"} if self.recomputes else {}
                try:
                    response = await client.post(transfer["metaserver"], json=ticket, headers=headers)
                except httpx.TransportError:  # as decode, which has time until its deadline
                    await anyio.sleep_forever()
                answers.append((response.status_code, response.json()))
                self.metaserver_answers.append(answers[-1])

            async with anyio.create_task_group() as tasks:
                for number, request_id in enumerate(self._engine_request_ids(received)):
                    ticket = make_ticket(request_id, f"ticket-{number}")
                    if self.token_ids is not None and transfer["wants_token_ids"] is True:
                        ticket["token_ids"] = self.token_ids
                    if self.intends:
                        ticket["ticket_follows"] = True
                    if self.adapter is not None:
                        ticket["prompt"] = {"adapter": self.adapter} if self.adapter else {}
                    tasks.start_soon(post, ticket)
            succeeded = all(status == 200 for status, _ in answers)
            if succeeded:
                succeeded = await self._receive(client, transfer["metaserver"], received)
        if not succeeded and self.hangs_when_prefill_fails:
            await anyio.sleep_forever()
        return succeeded or self.recomputes

    async def _receive(self, client: httpx.AsyncClient, metaserver: str, received: Received) -> bool:
        """Returns whether all KV arrives."""
        ids = self._engine_request_ids(received)
        lost = [number for number, request_id in enumerate(ids) if self.loses_all or request_id in self.lost]
        for number in lost:
            ticket = make_ticket(ids[number], f"ticket-{number}")
            await client.post(metaserver + "/failure", json=make_failure(ticket, "went silent"))
        return not lost

    def _explain(self, received: Received) -> None:
        if self.explains is not None:
            url = received.body["kv_transfer_params"]["metaserver"] + "/failure"
            failure = make_failure(self.tickets[-1], self.explains)
            threading.Timer(0.1, self._reasons.post, (url,), {"json": failure}).start()

    @staticmethod
    def _engine_request_ids(received: Received) -> list[str]:
        request_id, n = received.headers["x-request-id"], received.body.get("n", 1)
        if received.path == "/v1/responses":
            return [f"{received.body['request_id']}_0"]
        if received.path == "/inference/v1/generate":
            return [f"generate-tokens-{request_id}"]
        if received.path == "/v1/chat/completions/batch":
            return [f"chatcmpl-{request_id}_{i}" for i in range(len(received.body["messages"]))]
        if received.path != "/v1/completions":
            return [f"chatcmpl-{request_id}"] * n
        prompt = received.body["prompt"]
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return [f"cmpl-{request_id}-{i}" for i in range(len(prompt) if several else 1) for _ in range(n)]


def limit_of(received: Received) -> int:
    """Returns how many tokens a request asks for."""
    if received.path == "/v1/responses":
        return int(received.body["max_output_tokens"])
    params = received.body["sampling_params"] if received.path == "/inference/v1/generate" else received.body
    return int(params["max_tokens"])


def make_layerwise_ticket(request_id: str) -> dict[str, Any]:
    """Returns all that vllm-ascend's layerwise connector posts on decode; `tests/npu/contract` compares."""
    return {
        "token_ids": [],
        "request_id": request_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[3, 4, 5]],
        "remote_block_size": [128],
        "remote_engine_id": "decode-engine",
        "remote_host": "127.0.0.1",
        "remote_port": 30100,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }


def make_ticket(request_id: str, ticket_id: str) -> dict[str, Any]:
    return {**make_layerwise_ticket(request_id), "ticket_id": ticket_id}


def make_failure(ticket: dict[str, Any], reason: str) -> dict[str, Any]:
    """Returns decode's message about a failed transfer."""
    return {**{name: ticket[name] for name in ("request_id", "ticket_id")}, "reason": reason}


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
