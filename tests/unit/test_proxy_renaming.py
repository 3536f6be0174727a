# SPDX-License-Identifier: Apache-2.0
"""A client's X-Request-Id in the body of its answer, however the engine's answer is cut into chunks."""

import json
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from starlette.types import Message

from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.streams import Renaming, Reply
from vllm_ascend_pd.proxy.rendezvous.client_endpoint import ResponseRelay
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import ProxiedRequest, RequestTable

ID = "01234567-89ab-4def-8123-456789abcdef"
BODY = b'{"id":"chatcmpl-%s","choices":[{"text":"%s"}]}' % (ID.encode(), b"x" * 400)


def relayed(chunks: list[bytes], content_type: str, given: str = "abc") -> bytes:
    """Returns what the client gets of an engine's answer."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        parts = [*filter(None, chunks)]

        async def read() -> bytes:
            return parts.pop(0) if parts else b""

        answer: Any = SimpleNamespace(status=200, is_success=True, is_encoded=False, headers=[], read=read)
        answer.content_type = content_type
        answer.is_event_stream = content_type == "text/event-stream"
        reply = Reply(send, request_id=given)
        reply.renaming = Renaming.to(given, ID)
        request = ProxiedRequest("POST", Endpoint.CHAT.value, Endpoint.CHAT, [], reply)
        request.begin(ID)
        deliveries: Any = SimpleNamespace(answered=lambda *_, **__: None)
        relay = ResponseRelay(request, deliveries, ProxyObserver(RequestTable(1), ()))
        assert await relay.run(cast(EngineResponse, answer)) is None

    anyio.run(run)
    return b"".join(sent)


@pytest.mark.parametrize("given", ["abc", ID[::-1], 'a"b\\', "\xe9", "\x01"])
@pytest.mark.parametrize("events", [False, True], ids=["json", "stream"])
def test_wherever_an_answer_is_cut(given: str, events: bool) -> None:
    """The name is written as JSON writes it."""
    content_type = "text/event-stream" if events else "application/json"
    body = b"data: %s\n\ndata: %s\n\n" % (BODY, BODY) if events else BODY
    renamed = body.replace(ID.encode(), json.dumps(given, ensure_ascii=False)[1:-1].encode())
    for cut in range(0, len(body), 7):
        assert relayed([body[:cut], body[cut:]], content_type, given) == renamed
    assert relayed([body[at : at + 1] for at in range(len(body))], content_type, given) == renamed


def test_names_that_are_not_put_in() -> None:
    assert Renaming.to(ID, ID) is None
    assert Renaming.to("x" * 257, ID) is None
