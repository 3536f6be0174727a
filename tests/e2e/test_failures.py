# SPDX-License-Identifier: Apache-2.0
"""What goes wrong ends in an error for the client it concerns, and leaves nothing behind in the engines.

tests/faults has metaservers that fail.
"""

import time
from collections.abc import Iterator

import httpx
import pytest

from harness.client import Client, StreamError, random_prompt
from harness.clusters import POISONED_TOKENS, TP2_TO_TP1, Cluster
from harness.failures import poisoned_fails_alone, wait_all_blocks_free
from harness.plain_http import PLAIN_HTTP

pytestmark = [
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def nothing_leaks(cluster: Cluster, client: Client, reference) -> Iterator[None]:
    """After every test here both engines get all their blocks back, and go on serving."""
    yield
    wait_all_blocks_free(cluster)
    prompt = random_prompt(300, f"after {time.monotonic()}")
    assert client.complete(prompt).token_ids == reference.complete(prompt)


def test_one_layer_of_one_request_fails_that_request_alone(client: Client, reference) -> None:
    """And its client is told why."""
    failed = poisoned_fails_alone(client, reference, [300, 129, POISONED_TOKENS, 1000, 5, 640])
    assert failed.status_code == 503
    assert "poisoned by the test" in failed.json()["error"]["message"]
    with pytest.raises((httpx.HTTPStatusError, StreamError), match="poisoned by the test"):
        client.complete(random_prompt(POISONED_TOKENS, "told in a stream"), stream=True)


def test_made_up_ticket(cluster: Cluster, client: Client) -> None:
    ticket = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "request_id": "cmpl-made-up-0",
        "remote_block_ids": [[3, 4]],
        "remote_block_size": [128],
        "remote_engine_id": "nobody",
        "remote_host": "127.0.0.1",
        "remote_port": cluster.decode[0].kv_port,
        "remote_tp_size": 1,
        "remote_cached_tokens": 0,
        "ticket_id": "0" * 32,
        "num_tokens": 200,
    }
    body = {"model": client.model, "prompt": random_prompt(200, "made up"), "max_tokens": 1}
    url = f"{cluster.prefill[0].url}/v1/completions"
    answer = httpx.post(url, json={**body, "kv_transfer_params": ticket}, timeout=60, **PLAIN_HTTP)
    # Prefill itself is fine: the push comes to nothing, and its blocks come back.
    assert answer.status_code == 200
