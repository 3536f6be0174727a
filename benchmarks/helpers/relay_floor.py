# SPDX-License-Identifier: Apache-2.0
"""The least that a proxy like ours can do in its libraries: what `proxy_overhead.py` compares the proxy with.

$ python benchmarks/relay_floor.py --prefill URL --decode URL

Prints its port. A request has the same exchanges as at the proxy (the client's, decode's, the ticket's and prefill's),
and its stream is passed on chunk by chunk, by the same libraries (uvicorn, httptools, uvloop, aiohttp). That is all: it
checks, chooses and counts nothing, and an error is the end of it.
"""

import argparse
import json
import socket
import uuid
from typing import Any

import aiohttp
import uvicorn
from stub_engine import JSON, SSE, answer, body_of


class Relay:
    def __init__(self, prefill: str, decode: str, metaserver: str) -> None:
        self._prefill, self._decode, self._metaserver = prefill, decode, metaserver
        self._requests: dict[str, dict[str, Any]] = {}
        self._opened: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads(await body_of(receive))
        if scope["path"] == "/v1/metaserver":
            await self._run_prefill(body)
            await answer(send, b'{"status": "ok"}')
        else:
            await self._stream(body, send)

    async def _run_prefill(self, ticket: dict[str, Any]) -> None:
        request_id = ticket["request_id"].removeprefix("cmpl-").removesuffix("-0")
        request = {**self._requests[request_id], "kv_transfer_params": ticket, "max_tokens": 1, "stream": False}
        async with self._session.post(f"{self._prefill}/v1/completions", data=json.dumps(request)) as reply:
            await reply.read()

    async def _stream(self, request: dict[str, Any], send: Any) -> None:
        request_id = str(uuid.uuid4())
        self._requests[request_id] = request
        body = json.dumps({**request, "kv_transfer_params": {"metaserver": self._metaserver}})
        headers = {"X-Request-Id": request_id}
        async with self._session.post(f"{self._decode}/v1/completions", data=body, headers=headers) as reply:
            await send({"type": "http.response.start", "status": reply.status, "headers": SSE if reply.ok else JSON})
            async for chunk in reply.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        del self._requests[request_id]

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))
        return self._opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    print(port, flush=True)
    relay = Relay(args.prefill, args.decode, f"http://127.0.0.1:{port}/v1/metaserver")
    config = uvicorn.Config(
        relay, lifespan="off", ws="none", http="httptools", loop="uvloop", log_config=None, access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
