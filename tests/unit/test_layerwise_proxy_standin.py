# SPDX-License-Identifier: Apache-2.0
"""The stand-in for vllm-ascend's layerwise proxy sends requests again that decode has ended as recomputed."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from harness.client import EventData
from harness.http_server import Handler, serving
from harness.layerwise_proxy import LayerwiseProxy, layerwise_proxy
from harness.plain_http import PLAIN_HTTP

Event = dict[str, Any]

TEXTS = "/v1/completions"
CHATS = "/v1/chat/completions"
_IDS = {TEXTS: "cmpl-{}-0", CHATS: "chatcmpl-{}"}


def part(text: str, tokens: int, stop: str | None = None) -> Event:
    return {"choices": [{"text": text, "stop_reason": stop}], "usage": {"completion_tokens": tokens}}


def chat_part(role: str, text: str, tokens: int, stop: str | None = None) -> Event:
    """`role`: `message` of a whole answer, `delta` of a stream."""
    return {
        "choices": [{role: {"content": text}, "stop_reason": stop}],
        "usage": {"completion_tokens": tokens},
    }


@contextmanager
def standing(answers: list[list[Event]]) -> Iterator[tuple[LayerwiseProxy, list[Event], list[Event]]]:
    """The proxy before a decode engine that gives these answers. Yields what decode and prefill are asked, too."""
    asked: list[Event] = []
    prefilled: list[Event] = []

    class Decode(Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            ticket = {"request_id": _IDS[self.path].format(self.headers["X-Request-Id"])}
            httpx.post(body["kv_transfer_params"]["metaserver"], json=ticket, **PLAIN_HTTP).raise_for_status()
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")  # so that the proxy reads each event by itself
            self.end_headers()
            for event in answers[len(asked) - 1]:
                text = json.dumps(event)
                self._write(f"data: {text}\n\n" if body.get("stream") else text)
            self._write("")

        def _write(self, text: str) -> None:
            self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    class Prefill(Handler):
        def do_POST(self) -> None:
            prefilled.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.begin(200, "application/json")
            self.wfile.write(b"{}")

    with ExitStack() as stack:
        urls = [stack.enter_context(serving(kind)) for kind in (Prefill, Decode)]
        yield stack.enter_context(layerwise_proxy(*urls)), asked, prefilled


def ask(proxy: LayerwiseProxy, path: str = TEXTS, **body: Any) -> str:
    return httpx.post(f"{proxy.url}{path}", json=body, timeout=30, **PLAIN_HTTP).text


def streamed(text: str) -> list[Event]:
    return [json.loads(data) for data in EventData().feed(text.encode())]


def test_decode_is_asked_for_the_rest_and_prefill_for_the_first_prompt() -> None:
    with standing([[part(" a b c", 4, "recomputed")], [part(" d", 1)]]) as (proxy, asked, prefilled):
        answer = json.loads(ask(proxy, prompt="x", max_tokens=9))
        assert (proxy.recomputed, proxy.swallowed) == (1, [])
    assert [body["prompt"] for body in asked] == ["x", "x a b c"]
    assert asked[1]["max_tokens"] == 6
    assert [body["prompt"] for body in prefilled] == ["x", "x"]
    assert answer["choices"][0]["text"] == " a b c d"


def test_a_stream_goes_on_with_the_text_so_far() -> None:
    """Its part ends with an event that has no token."""
    first, last = part(" a", 1), part(" d", 1)
    with standing([[first, part("", 1, "recomputed")], [last]]) as (proxy, asked, prefilled):
        answer = streamed(ask(proxy, prompt="x", max_tokens=9, stream=True))
        assert (proxy.recomputed, proxy.swallowed) == (1, [])
    assert [body["prompt"] for body in asked] == ["x", "x a"]
    assert asked[1]["max_tokens"] == 8
    assert [body["prompt"] for body in prefilled] == ["x", "x"]
    assert answer == [first, last]


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}]], ids=["text", "parts"])
def test_a_chat_goes_on_behind_its_first_message(content: Any) -> None:
    answers = [[chat_part("message", " a b c", 4, "recomputed")], [chat_part("message", " d", 1)]]
    messages = [{"role": "user", "content": content}, {"role": "user", "content": "y"}]
    with standing(answers) as (proxy, asked, prefilled):
        answer = json.loads(ask(proxy, CHATS, messages=messages, max_tokens=9))
        assert (proxy.recomputed, proxy.swallowed) == (1, [])
    assert [[each["content"] for each in body["messages"]] for body in asked] == [[content, "y"], ["x a b c", "y"]]
    assert asked[1]["max_tokens"] == 6
    assert [body["messages"] for body in prefilled] == [messages, messages]
    assert answer["choices"][0]["message"]["content"] == " a b c d"


def test_a_streamed_chat_goes_on() -> None:
    first, last = chat_part("delta", " a", 1), chat_part("delta", " d", 1)
    with standing([[first, chat_part("delta", "", 1, "recomputed")], [last]]) as (proxy, asked, _):
        messages = [{"role": "user", "content": "x"}]
        answer = streamed(ask(proxy, CHATS, messages=messages, max_tokens=9, stream=True))
        assert (proxy.recomputed, proxy.swallowed) == (1, [])
    assert asked[1]["messages"][0]["content"] == "x a"
    assert asked[1]["max_tokens"] == 8
    assert answer == [first, last]


def test_a_prompt_of_token_ids_ends_there() -> None:
    with standing([[part(" a", 2, "recomputed")]]) as (proxy, asked, _):
        assert ask(proxy, prompt=[1, 2], max_tokens=9) == ""
        assert len(asked) == 1
        assert "TypeError" in proxy.swallowed[0]
