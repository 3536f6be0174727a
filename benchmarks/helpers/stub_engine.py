# SPDX-License-Identifier: Apache-2.0
"""An engine that computes nothing, in a process of its own: what `proxy_overhead.py` puts behind the proxy.

$ python benchmarks/stub_engine.py prefill|decode [--port 0]

Prints its port. Decode posts a ticket for each prompt of a request that names a metaserver, as the connector does. Once
these are answered it streams `max_tokens` tokens. Prefill answers tickets' requests, and tickets that are posted to it.
"""

import argparse
import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import uvicorn

_COMPLETION = b'{"object": "text_completion", "choices": [{"index": 0, "text": "x"}]}'
_CONNECTIONS = 256  # to the metaserver, as a decode engine has (`metaserver_max_connections`)
GATHER_SECONDS = 150.0
"""For which a stream waits for others, if its request says so."""
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
_METRICS = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
_LINE = b'vllm:generation_tokens_total{engine="0",model_name="stub"} 1.0\n'
_TICKET = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [list(range(8))],
    "remote_block_size": [128],
    "remote_engine_id": "stub",
    "remote_host": "127.0.0.1",
    "remote_port": 30100,
    "remote_tp_size": 1,
    "remote_cached_tokens": 0,
}
_TOKEN_IDS = [1000 * number for number in range(120)]
"""Of `proxy_overhead.PROMPT`, as it were."""


class StubEngine:
    """A raw ASGI application. Its own cost is in both sides of the comparison."""

    def __init__(self, role: str, metrics_mib: int = 0) -> None:
        self._metrics = _METRICS + _LINE * (metrics_mib * 2**20 // len(_LINE))
        self._generate = self._decode if role == "decode" else self._prefill
        self._session: aiohttp.ClientSession | None = None
        self._open = 0
        self._gathered = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/completions":
            request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode()
            await self._generate(json.loads(await body_of(receive)), request_id, send)
        elif scope["path"] == "/v1/metaserver":
            await body_of(receive)
            await answer(send, b'{"status": "ok"}')
        elif scope["path"] == "/v1/chat/completions":
            await body_of(receive)
            await answer(send, _COMPLETION)
        else:
            await answer(send, self._metrics if scope["path"] == "/metrics" else b"", [])

    async def _prefill(self, _: dict[str, Any], __: str, send: Any) -> None:
        await answer(send, _COMPLETION)

    async def _decode(self, body: dict[str, Any], request_id: str, send: Any) -> None:
        params = body.get("kv_transfer_params") or {}
        prompt = body["prompt"]
        prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
        token_ids = _TOKEN_IDS if params.get("wants_token_ids") and prompts == 1 else []
        metaserver = params.get("metaserver")
        if metaserver is not None and not all(
            await asyncio.gather(*(self._post(metaserver, request_id, number, token_ids) for number in range(prompts)))
        ):
            error = b'{"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}'
            await answer(send, error, status=500)
            return
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for number, event in enumerate(_events(body["max_tokens"])):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if number == 0 and "wait_for_streams" in body:
                await self._gather(body["wait_for_streams"])
            await asyncio.sleep(body.get("token_ms", 0) / 1000)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _post(self, metaserver: str, request_id: str, prompt: int, token_ids: list[int]) -> bool:
        if self._session is None:
            # The prefill stub closes connections that were idle for 5 s: a post must not meet that.
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=2)
            self._session = aiohttp.ClientSession(connector=connector)
        ids = {
            "request_id": f"cmpl-{request_id}-{prompt}",
            "ticket_id": f"{request_id}-{prompt}",
            "token_ids": token_ids,
        }
        ticket = {**_TICKET, **ids}
        async with self._session.post(metaserver, json=ticket) as reply:
            await reply.read()
            return reply.status == 200

    async def _gather(self, streams: int) -> None:
        """Waits until that many streams are open at the same time. Raises TimeoutError."""
        self._open += 1
        if self._open >= streams:
            self._gathered.set()
        await asyncio.wait_for(self._gathered.wait(), GATHER_SECONDS)


def _events(tokens: int) -> Iterator[bytes]:
    for number in range(tokens):
        choice = {"index": 0, "text": f" token{number}", "logprobs": None, "finish_reason": None}
        event = {"id": "cmpl-stub", "object": "text_completion", "created": 0, "model": "stub", "choices": [choice]}
        yield b"data: " + json.dumps(event).encode() + b"\n\n"


async def body_of(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def answer(send: Any, body: bytes, headers: list[tuple[bytes, bytes]] = JSON, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["prefill", "decode"])
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--metrics-mib", type=int, default=0, help="size of its /metrics")
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", args.port), backlog=4096)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        StubEngine(args.role, args.metrics_mib),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        backlog=4096,
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
