# SPDX-License-Identifier: Apache-2.0
"""The least proxy that vLLM's MooncakeConnector works with: `ttft.py` measures it behind this.

$ python benchmarks/helpers/pull_proxy.py [--bootstrap URL] --prefill URL --decode URL --port 8000

Does what vLLM's own example does, in faster libraries, and nothing else. With MooncakeConnector's bootstrap server, it
asks both engines at once, with an id that joins them. Without, it asks prefill first, and then decode gets the prompt's
last token alone, which is all that it computes where KV is transferred; its answers are wrong, and took what two
engines take without any transfer.
"""

import argparse
import asyncio
import json
import uuid
from typing import Any

import aiohttp
import uvicorn
from stub_engine import JSON, SSE, answer, body_of

FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
FOR_DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


class PullProxy:
    def __init__(self, prefill: str, decode: str, bootstrap: str | None) -> None:
        self._prefill, self._decode, self._bootstrap = prefill, decode, bootstrap
        self._engine_id: str | None = None
        self._opened: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await answer(send, b"{}")
            return
        request = json.loads(await body_of(receive))
        request_id = str(uuid.uuid4())
        if self._bootstrap is None:
            await self._run_prefill(request, request_id, None)
            await self._stream({**request, "prompt": request["prompt"][-1:]}, request_id, None, send)
            return
        transfer = {"transfer_id": f"transfer-{request_id}"}
        from_where = {"remote_bootstrap_addr": self._bootstrap, "remote_engine_id": await self._engine()}
        prefill = asyncio.create_task(self._run_prefill(request, request_id, FOR_PREFILL | transfer))
        await self._stream(request, request_id, FOR_DECODE | transfer | from_where, send)
        await prefill

    async def _run_prefill(self, request: dict[str, Any], request_id: str, params: dict[str, Any] | None) -> None:
        body = {**request, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        url, headers = f"{self._prefill}/v1/completions", {"X-Request-Id": request_id}
        async with self._session.post(url, json=body, headers=headers) as reply:
            reply.raise_for_status()
            await reply.read()

    async def _stream(self, request: dict[str, Any], request_id: str, params: dict[str, Any] | None, send: Any) -> None:
        body = {**request, "kv_transfer_params": params}
        url, headers = f"{self._decode}/v1/completions", {"X-Request-Id": request_id}
        async with self._session.post(url, json=body, headers=headers) as reply:
            await send({"type": "http.response.start", "status": reply.status, "headers": SSE if reply.ok else JSON})
            async for chunk in reply.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _engine(self) -> str:
        """The prefill engine's id, as Mooncake's bootstrap server knows it."""
        if self._engine_id is None:
            async with self._session.get(f"{self._bootstrap}/query") as reply:
                [entry] = (await reply.json()).values()
                self._engine_id = str(entry["engine_id"])
        return self._engine_id

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self._opened = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))
        return self._opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--bootstrap", help="MooncakeConnector's bootstrap server, on prefill")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    proxy = PullProxy(args.prefill, args.decode, args.bootstrap)
    uvicorn.run(
        proxy,
        host="127.0.0.1",
        port=args.port,
        lifespan="off",
        ws="none",
        http="httptools",
        loop="uvloop",
        access_log=False,
    )


if __name__ == "__main__":
    main()
