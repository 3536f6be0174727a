# SPDX-License-Identifier: Apache-2.0
"""Engines with vllm-ascend's `MooncakeLayerwiseConnector` as the proxy sees them. Its decode side posts a ticket
without fields of ours, never looks at the answer, and waits for KV without a deadline; its prefill side says nothing
of a transfer that failed, and signals the end of one under its own request's id."""

from __future__ import annotations

import anyio
import httpx
from engine_standin import DecodeEngine, PrefillEngine, Received, make_layerwise_ticket
from starlette.responses import JSONResponse, Response

from harness.plain_http import PLAIN_HTTP

_POSTS = 3


class LayerwiseDecodeEngine(DecodeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.arrived: set[str] = set()
        """Ids under which prefill has signalled that all is written."""

    async def _prefill(self, received: Received) -> bool:
        transfer = received.body["kv_transfer_params"]
        assert set(transfer) == {"do_remote_prefill", "do_remote_decode", "metaserver", "wants_token_ids"}
        assert transfer["do_remote_prefill"] is True
        ids = self._engine_request_ids(received)
        async with anyio.create_task_group() as tasks:
            for request_id in ids:
                tasks.start_soon(self._post, transfer["metaserver"], request_id)
            while not self.arrived.issuperset(ids):
                await anyio.sleep(0.01)
        return True

    async def _post(self, url: str, request_id: str) -> None:
        """Until it is answered, whatever the answer says."""
        ticket = make_layerwise_ticket(request_id)
        self.tickets.append(ticket)
        # Not httpx's own five seconds: the answer comes when prefill has ended.
        async with httpx.AsyncClient(timeout=None, **PLAIN_HTTP) as client:
            for _ in range(_POSTS):
                try:
                    answer = await client.post(url, json=ticket)
                    self.metaserver_answers.append((answer.status_code, answer.json()))
                    return
                except httpx.HTTPError:
                    continue

    @staticmethod
    def _engine_request_ids(received: Received) -> list[str]:
        """Each sample's begins with its number."""
        ids = DecodeEngine._engine_request_ids(received)
        n = received.body.get("n", 1)
        return ids if n == 1 else [f"{i % n}_{request_id}" for i, request_id in enumerate(ids)]


class LayerwisePrefillEngine(PrefillEngine):
    def __init__(self, decode: LayerwiseDecodeEngine) -> None:
        super().__init__()
        self._decode = decode

    async def _answer(self, received: Received) -> Response:
        while self.holds:
            await anyio.sleep(0.01)
        if self.hangs:
            await anyio.sleep_forever()
        ticket = received.body["kv_transfer_params"]
        assert (ticket["do_remote_prefill"], ticket["do_remote_decode"]) == (False, True)
        assert (received.body["max_tokens"], received.body["stream"]) == (1, False)
        [own_id] = DecodeEngine._engine_request_ids(received)
        self._decode.arrived.add(own_id)
        choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
        return JSONResponse({"object": "text_completion", "choices": choices, "kv_transfer_params": None})
