# SPDX-License-Identifier: Apache-2.0
"""The stand-in for vllm-ascend's layerwise proxy sends requests again that decode has ended as recomputed."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from harness.http_server import Handler, serving
from harness.layerwise_proxy import LayerwiseProxy, layerwise_proxy
from harness.plain_http import PLAIN_HTTP

Event = dict[str, Any]


def part(text: str, tokens: int, stop: str | None = None) -> Event:
    return {"choices": [{"text": text, "stop_reason": stop}], "usage": {"completion_tokens": tokens}}


@contextmanager
def standing(answers: list[list[Event]]) -> Iterator[tuple[LayerwiseProxy, list[Event], list[Event]]]:
    """The proxy before a decode engine that gives these answers. Yields what decode and prefill are asked, too."""
    asked: list[Event] = []
    prefilled: list[Event] = []

    class Decode(Handler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            ticket = {"request_id": f"cmpl-{self.headers['X-Request-Id']}-0"}
            httpx.post(body["kv_transfer_params"]["metaserver"], json=ticket, **PLAIN_HTTP).raise_for_status()
            self.begin(200, "application/json")
            for event in answers[len(asked) - 1]:
                self.wfile.write(json.dumps(event).encode())

    class Prefill(Handler):
        def do_POST(self) -> None:
            prefilled.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.begin(200, "application/json")
            self.wfile.write(b"{}")

    with ExitStack() as stack:
        urls = [stack.enter_context(serving(kind)) for kind in (Prefill, Decode)]
        yield stack.enter_context(layerwise_proxy(*urls)), asked, prefilled


def ask(proxy: LayerwiseProxy, **body: Any) -> str:
    return httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=30, **PLAIN_HTTP).text


@pytest.mark.parametrize("stream", [False, True])
def test_decode_is_asked_for_the_rest_and_prefill_for_the_first_prompt(stream: bool) -> None:
    """A stream's part ends with a chunk that has no token."""
    first = part("", 1, "recomputed") if stream else part(" a b c", 4, "recomputed")
    with standing([[first], [part(" d", 1)]]) as (proxy, asked, prefilled):
        answer = json.loads(ask(proxy, prompt="x", max_tokens=9, stream=stream))
        assert proxy.recomputed == 1
        assert proxy.swallowed == []
    so_far = "" if stream else " a b c"
    assert [body["prompt"] for body in asked] == ["x", f"x{so_far}"]
    assert asked[1]["max_tokens"] == (9 if stream else 6)
    assert [body["prompt"] for body in prefilled] == ["x", "x"]
    assert answer["choices"][0]["text"] == f"{so_far} d"


def test_a_prompt_of_token_ids_ends_there() -> None:
    with standing([[part(" a", 2, "recomputed")]]) as (proxy, asked, _):
        assert ask(proxy, prompt=[1, 2], max_tokens=9) == ""
        assert len(asked) == 1
        assert "TypeError" in proxy.swallowed[0]
