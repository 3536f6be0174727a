# SPDX-License-Identifier: Apache-2.0
"""Prefill whose front end is not decode's: it computes decode's tokens, or refuses, and says why."""

import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from test_scheduling import FEW_BLOCKS

from harness.client import Client, random_prompt
from harness.clusters import TRACED, Cluster
from harness.failures import wait_all_blocks_free
from harness.metaserver import metaserver
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference

pytestmark = pytest.mark.timeout(600)
another_template = pytest.mark.parametrize("cluster", [TRACED], ids=str, indirect=True)
no_tokenizer = pytest.mark.parametrize("cluster", [FEW_BLOCKS], ids=str, indirect=True)
MESSAGES = [{"role": "user", "content": "Which layer comes before layer 9? " * 10}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
RENDERED_DIFFERENTLY = "the prompt's tokens differ: decode and prefill rendered or tokenized it differently"


@another_template
def test_a_chat_is_answered_as_by_a_single_engine(cluster: Cluster, client: Client, reference: Reference) -> None:
    before = cluster.prefill[0].metric("vllm:prompt_tokens_total")
    assert client.chat(MESSAGES).token_ids == reference.chat(MESSAGES)
    assert client.chat(MESSAGES, stream=True).token_ids == reference.chat(MESSAGES)
    assert cluster.prefill[0].metric("vllm:prompt_tokens_total") > before


@another_template
def test_tools_that_prefill_is_not_started_for(cluster: Cluster, client: Client) -> None:
    """Prefill has neither `--enable-auto-tool-choice` nor a parser."""
    body = {"model": client.model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}
    body |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "priority": 3}
    asked = [
        httpx.post(f"{cluster.prefill[0].url}/v1/chat/completions", json=each, timeout=60, **PLAIN_HTTP)
        for each in (body, {**body, "tool_choice": None, "max_tokens": 1})
    ]
    assert asked[0].status_code == 400, "prefill would serve such a chat by itself"
    assert asked[1].status_code == 200, "so the proxy asks for a prompt with an image"
    alone = httpx.post(f"{cluster.decode[0].url}/v1/chat/completions", json=body, timeout=120, **PLAIN_HTTP)
    received = "vllm:kv_pd_ticket_to_ready_seconds_count"
    before = cluster.decode[0].metric(received)
    answer = client.http.post("/v1/chat/completions", json={**body, "messages": [*MESSAGES, *MESSAGES]})
    assert (answer.status_code, alone.status_code) == (200, 200), answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == 8
    assert cluster.decode[0].metric(received) == before + 1


@contextmanager
def another_proxy(cluster: Cluster, model: str) -> Iterator[tuple[str, "queue.Queue[str | None]"]]:
    """A metaserver that asks prefill by the client's text, as others than our proxy do: its URL, and what prefill says
    of each transfer."""
    said: queue.Queue[str | None] = queue.Queue()

    def ask_prefill(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        ticket = json.loads(body)
        assert ticket["token_ids"] == []
        asked = {"model": model, "messages": MESSAGES, "max_tokens": 1, "kv_transfer_params": ticket}
        response = httpx.post(f"{cluster.prefill[0].url}/v1/chat/completions", json=asked, timeout=120, **PLAIN_HTTP)
        reason = (response.json()["kv_transfer_params"] or {}).get("error")
        said.put(reason)
        handler.send_response(200 if reason is None else 502)
        handler.end_headers()
        handler.wfile.write(json.dumps({"error": reason}).encode())

    with metaserver(ask_prefill) as url:
        yield url, said


@another_template
def test_a_prompt_that_prefill_renders_differently_is_refused(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    """Of a proxy that sends text. Its number of tokens is the same."""
    with another_proxy(cluster, client.model) as (url, said), ThreadPoolExecutor(1) as pool:
        params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url}
        body: dict[str, Any] = {"model": client.model, "messages": MESSAGES, "max_tokens": 8, "cache_salt": "another"}
        asked = pool.submit(
            httpx.post,
            f"{cluster.decode[0].url}/v1/chat/completions",
            json={**body, "kv_transfer_params": params},
            timeout=120,
            **PLAIN_HTTP,
        )
        reason = said.get(timeout=120)
        assert reason is not None
        assert reason.startswith(RENDERED_DIFFERENTLY)
        assert asked.result().status_code == 500
    assert RENDERED_DIFFERENTLY in cluster.prefill[0].log.read_text()
    assert client.chat(MESSAGES).token_ids == reference.chat(MESSAGES)
    wait_all_blocks_free(cluster)


@no_tokenizer
def test_prefill_without_a_tokenizer(cluster: Cluster, client: Client, reference: Reference) -> None:
    received = "vllm:kv_pd_ticket_to_ready_seconds_count"
    before = cluster.decode[0].metric(received)
    assert client.chat(MESSAGES).token_ids == reference.chat(MESSAGES)
    prompt = random_prompt(300, "token ids in, token ids out")
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    body = {"model": client.model, "token_ids": prompt, "sampling_params": sampling}
    answer = client.http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert tuple(answer.json()["choices"][0]["token_ids"]) == reference.complete(prompt)
    assert cluster.decode[0].metric(received) == before + 2
    wait_all_blocks_free(cluster)
