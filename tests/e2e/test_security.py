# SPDX-License-Identifier: Apache-2.0
"""A cluster with a secret: it works, and others get nothing. Decode also posts tickets by mutual TLS, as to a
gateway."""

import json
import queue
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from secured import Files

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.failures import wait_all_blocks_free
from harness.metaserver import metaserver
from harness.pool import ClusterPool, Reference
from vllm_ascend_pd.core.secret import Use

pytestmark = pytest.mark.timeout(900)

REPLAY = "the ticket was used before: a replay"


@pytest.fixture
def cluster(secured: ClusterConfig, cluster_pool: ClusterPool) -> Cluster:
    return cluster_pool.get(secured)


def test_the_text_is_right(cluster: Cluster, client: Client, reference: Reference) -> None:
    prompts = [random_prompt(tokens, "secured") for tokens in (5, 129, 300, 640, 1000, 2000)]
    answers = at_once(client.complete, prompts, concurrency=len(prompts))
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    streamed = client.complete(random_prompt(300, "secured stream"), stream=True)
    assert streamed.token_ids == reference.complete(random_prompt(300, "secured stream"))
    wait_all_blocks_free(cluster)


@contextmanager
def intercepted(
    files: Files,
) -> Iterator[tuple[str, "queue.Queue[tuple[str | None, dict[str, Any]]]", threading.Event]]:
    """A metaserver in place of the proxy's, by mutual TLS: its URL, what is posted to it (authorization, ticket), and
    what makes it answer."""
    posted: queue.Queue[tuple[str | None, dict[str, Any]]] = queue.Queue()
    answer = threading.Event()

    def keep(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        posted.put((handler.headers["Authorization"], json.loads(body)))
        answer.wait(120)
        handler.send_response(200)
        handler.end_headers()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority.cert))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(files.proxy.cert, files.proxy.key)
    with metaserver(keep, tls) as url:
        try:
            yield url, posted, answer
        finally:
            answer.set()


def test_tickets_that_are_unsigned_altered_or_replayed(
    cluster: Cluster, client: Client, reference: Reference, files: Files
) -> None:
    prompt = random_prompt(700, "intercepted")

    def ask_engine(url: str, params: dict[str, Any], max_tokens: int, asked: list[int] = prompt) -> dict[str, Any]:
        body = {"model": client.model, "prompt": asked, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "kv_transfer_params": params}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=240, trust_env=False)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def prefill(ticket: dict[str, Any], asked: list[int] = prompt) -> str | None:
        """What P says went wrong."""
        params = ask_engine(cluster.prefill[0].url, ticket, 1, asked)["kv_transfer_params"]
        return None if params is None else params.get("error")

    with intercepted(files) as (url, posted, answer), ThreadPoolExecutor(9) as pool:
        wants = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url}
        wants["metaserver_signature"] = files.cluster_secret().sign(Use.METASERVER, url.encode())
        decoded = pool.submit(ask_engine, cluster.decode[0].url, wants, 16)
        authorization, ticket = posted.get(timeout=120)
        assert authorization == f"Bearer {files.cluster_secret().keys(Use.METASERVER_TOKEN)[0].hex()}"
        others = [random_prompt(tokens, "beside the intercepted") for tokens in (40, 200, 500, 850)]
        beside = [pool.submit(client.complete, other) for other in others]

        refused = {
            "unsigned": {**ticket, "signature": ""},
            "another-host": {**ticket, "remote_host": "192.0.2.1"},
            "other-blocks": {**ticket, "remote_block_ids": [[block + 1 for block in ticket["remote_block_ids"][0]]]},
            "prolonged": {**ticket, "expires_at": ticket["expires_at"] + 3600},
            "for-any-prompt": {name: value for name, value in ticket.items() if name != "prompt"},
        }
        errors = {what: prefill(changed) for what, changed in refused.items()}
        assert "not signed" in (errors.pop("unsigned") or "")
        assert "not in peers" in (errors.pop("another-host") or "")
        assert all("altered" in (error or "") for error in errors.values()), errors

        another_prompt = random_prompt(700, "whoever takes a ticket from its way")
        assert "the prompt's tokens differ" in (prefill(ticket, another_prompt) or "")

        assert prefill(ticket) is None, "after all that was refused, the ticket itself is as good as before"
        assert prefill(ticket) in ("this ticket is being served already", REPLAY)
        answer.set()
        assert tuple(decoded.result()["choices"][0]["token_ids"]) == reference.complete(prompt)
        assert [one.result().token_ids for one in beside] == [reference.complete(other) for other in others]
        wait_all_blocks_free(cluster)
        assert prefill(ticket) == REPLAY
    wait_all_blocks_free(cluster)


def test_no_log_shows_a_secret(cluster: Cluster, client: Client, files: Files) -> None:
    client.complete(random_prompt(20, "one more before the logs are read"))
    for server in (*cluster.prefill, *cluster.decode, cluster.proxy):
        log = server.log.read_text(errors="replace")
        assert str(files.secret) in log or server is cluster.proxy, "vLLM shows its config: this test looks at it"
        for secret in files.contents():
            assert secret not in log, f"{server.name} logged a secret"
