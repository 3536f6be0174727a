# SPDX-License-Identifier: Apache-2.0
"""Routers that ask prefill first: vllm-router's own binary, and stand-ins that send what others send, in their order.

The stand-ins are written from the sources of vLLM (`toy_proxy_server.py` of its NIXL tests, and of its examples
`mooncake_connector_proxy.py`), of llm-d's sidecar (`nixlv2`, `mooncake`) and of Dynamo, which uses vLLM's Python
interface: here it is HTTP.
"""

import enum
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from harness.engines import HOST, Engine, Server, script, wait_ready
from harness.http_server import Handler, serving
from harness.plain_http import PLAIN_HTTP
from harness.processes import ManagedProcess
from vllm_ascend_pd.core.hosts import authority

HAS_VLLM_ROUTER = Path(sys.executable).with_name("vllm-router").exists() or shutil.which("vllm-router") is not None
NEEDS_VLLM_ROUTER = "needs vllm-router: scripts/setup_env.sh --with-router"

NOBODY = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
"""What NIXL's routers send to prefill beside the two `do_` keys."""


class VllmRouter(Server):
    """A `vllm-router` process. `command`: the words of its command line, but for what is this test's own."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        super().__init__(name, None, logs)
        more = ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(self._reserve())]
        self._command = [script(command[0]), *command[1:], *more]
        self.start()

    def start(self) -> None:
        """Again, after its `process` was stopped or killed."""
        self.process = ManagedProcess(self.name, self._command, os.environ, self.log)


@contextmanager
def vllm_router(name: str, command: Sequence[str], logs: Path) -> Iterator[VllmRouter]:
    router = VllmRouter(name, command, logs)
    try:
        wait_ready([router])
        yield router
    finally:
        router.stop()


class Flow(enum.Enum):
    """What a router sends, and in which order."""

    VLLM_NIXL = "vLLM's toy proxy for NIXL"
    VLLM_MOONCAKE = "vLLM's example proxy for Mooncake"
    LLM_D_NIXL = "llm-d, nixlv2"
    LLM_D_MOONCAKE = "llm-d, mooncake"
    DYNAMO = "Dynamo"


class StandIn:
    """A router of one prefill and one decode engine."""

    def __init__(self, flow: Flow, prefill: Engine, decode: Engine) -> None:
        self.flow = flow
        self.url = ""
        self.answers: list[dict[str, Any] | None] = []
        """Prefill's `kv_transfer_params`."""
        self._prefill, self._decode = prefill, decode
        self._http = httpx.Client(timeout=300, **PLAIN_HTTP)
        self._beside = ThreadPoolExecutor(64)
        self._engine_id: str | None = None

    def serve(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Decode's answer. Raises httpx.HTTPStatusError."""
        request_id = str(uuid.uuid4())
        prefilled: Future[Any] | None = None
        match self.flow:
            case Flow.VLLM_MOONCAKE:
                prefilled = self._beside.submit(self._ask_prefill, path, body, request_id)
                params = self._bootstrap_params(request_id)
            case Flow.LLM_D_MOONCAKE:
                self._ask_prefill(path, body, request_id)
                params = self._bootstrap_params(request_id)
            case _:
                params = self._ask_prefill(path, body, request_id)
        asked = {**body, "kv_transfer_params": params} if params else body
        with self._http.stream("POST", self._decode.url + path, json=asked, headers=_headers(request_id)) as response:
            if response.is_error:
                response.read()
            response.raise_for_status()
            yield from response.iter_bytes()
        if prefilled is not None:
            prefilled.result(60)

    def close(self) -> None:
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _ask_prefill(self, path: str, body: dict[str, Any], request_id: str) -> dict[str, Any] | None:
        asked = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": self._for_prefill(request_id)}
        asked.pop("stream_options", None)
        if "max_completion_tokens" in asked or self.flow in (Flow.LLM_D_NIXL, Flow.LLM_D_MOONCAKE):
            asked["max_completion_tokens"] = 1
        if self.flow is Flow.DYNAMO:
            asked["min_tokens"] = 1
        if self.flow is Flow.VLLM_NIXL:
            asked.pop("min_tokens", None)
        headers = _headers(request_id)
        if self.flow is Flow.VLLM_MOONCAKE:
            headers["X-data-parallel-rank"] = "0"
        response = self._http.post(self._prefill.url + path, json=asked, headers=headers)
        response.raise_for_status()
        self.answers.append(response.json().get("kv_transfer_params"))
        return self.answers[-1]

    def _for_prefill(self, request_id: str) -> dict[str, Any]:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.flow in (Flow.VLLM_MOONCAKE, Flow.LLM_D_MOONCAKE):
            return params | {"transfer_id": f"xfer-{request_id}"}
        return params | NOBODY

    def _bootstrap_params(self, request_id: str) -> dict[str, Any]:
        address = f"http://{authority(self._prefill.config.host, self._prefill.bootstrap_port)}"
        if self._engine_id is None:  # they ask once
            [self._engine_id] = [each["engine_id"] for each in self._http.get(f"{address}/query").json().values()]
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": address,
            "remote_engine_id": self._engine_id,
            "transfer_id": f"xfer-{request_id}",
        }


def _headers(request_id: str) -> dict[str, str]:
    return {"Authorization": "Bearer None", "X-Request-Id": request_id}


@contextmanager
def stand_in(flow: Flow, prefill: Engine, decode: Engine) -> Iterator[StandIn]:
    """Such a router, serving HTTP. A status that an engine answers is its own, too."""
    router = StandIn(flow, prefill, decode)

    class Requests(Handler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chunks = router.serve(self.path, body)
            try:
                first = next(chunks, b"")
            except httpx.HTTPStatusError as error:
                self.begin(error.response.status_code, "application/json")
                self.wfile.write(error.response.content)
                return
            self.begin(200, "text/event-stream" if body.get("stream") else "application/json")
            self.wfile.write(first)
            for chunk in chunks:
                self.wfile.write(chunk)

    try:
        with serving(Requests) as router.url:
            yield router
    finally:
        router.close()
