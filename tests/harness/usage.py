# SPDX-License-Identifier: Apache-2.0
"""Reads `usage` from answers, on all routes that have it."""

import json
import time
from typing import Any

import httpx

from harness.client import random_prompt
from harness.engines import Engine
from harness.plain_http import PLAIN_HTTP
from harness.waiting import wait_until


def about(route: str, stream: bool, name: str) -> list[dict[str, str]]:
    text = f"{name}{'Stream' if stream else 'Say'} on {route}: what comes after layer 7? "
    return [{"role": "user", "content": text * 9}]


SAYS_CACHED = "/v1/responses"
"""The route whose `usage` has cached tokens also without `--enable-prompt-tokens-details`."""


def asks_for(text: object, stream: bool, max_tokens: int = 8) -> dict[str, Any]:
    """Returns the body of a request on the route `SAYS_CACHED`. `text`: that, or messages."""
    return {"input": text, "max_output_tokens": max_tokens, "ignore_eos": True, "stream": stream}


USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, Any] = {
    "/v1/completions": lambda stream, name: {
        "prompt": random_prompt(300, f"{name}usage {stream}"),
        "max_tokens": 8,
        "ignore_eos": True,
        **(USAGE if stream else {}),
    },
    "/v1/chat/completions": lambda stream, name: {
        "messages": about("chat", stream, name),
        "max_tokens": 8,
        "ignore_eos": True,
        **(USAGE if stream else {}),
    },
    SAYS_CACHED: lambda stream, name: asks_for(about("responses", stream, name), stream),
    "/v1/messages": lambda stream, name: {"messages": about("messages", stream, name), "max_tokens": 8},
}
ASKED = [(path, stream) for path in BODIES for stream in (False, True)]


def usages(url: str, model: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all `usage` values in the answer to a request, in order."""
    return usages_in(httpx.post(url + path, json={"model": model, "temperature": 0, **body}, timeout=120, **PLAIN_HTTP))


def usages_in(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns all `usage` values in an answer, in order."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json()["usage"]]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    holders = [holder for event in events for holder in (event, event.get("message"), event.get("response"))]
    found = [holder["usage"] for holder in holders if holder and holder.get("usage")]
    assert found, answer.text
    return found


def asked_of_all(url: str, model: str, name: str = "") -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """Asks on all routes, with and without a stream. Returns each answer's `usage` values. Another `name` makes other
    prompts."""
    return {
        (path, stream): usages(url, model, path, {**BODIES[path](stream, name), "stream": stream})
        for path, stream in ASKED
    }


def cached_tokens(usage: dict[str, Any]) -> int:
    """Returns the cached tokens in a `usage`; 0 if a version of vLLM leaves the field out."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0


def forget(*engines: Engine) -> None:
    """Empties the prefix caches, after all that was sent or received has been released."""
    for engine in engines:
        if "success" not in _reset(engine):  # vLLM before 0.32 does not say so
            time.sleep(1.0)
            _reset(engine)
        else:
            wait_until(lambda engine=engine: _reset(engine)["success"], 30)


def _reset(engine: Engine) -> dict[str, Any]:
    answer = httpx.post(f"{engine.url}/reset_prefix_cache", timeout=30, **PLAIN_HTTP)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else {}
