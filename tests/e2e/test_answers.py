# SPDX-License-Identifier: Apache-2.0
"""What engines answer besides tokens: one prefill engine refuses everybody, the other engines admit few requests and
abort some, and decode has a name for the model that prefill does not know. Clients get a single engine's tokens."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import PATIENT_PROXY, Cluster, ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role
from harness.failures import wait_all_blocks_free
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference

ALIAS = "an-alias"
REFUSING = EngineConfig(Role.PREFILL, connector_extra=PATIENT, args=("--api-key", "of-nobody"))
PREFILL = EngineConfig(
    Role.PREFILL,
    max_num_batched_tokens=64,
    connector_extra=PATIENT,
    args=("--max-num-queued-reqs", "2"),
    env=(("VLLM_SERVER_DEV_MODE", "1"),),
)
DECODE = EngineConfig(
    Role.DECODE,
    connector_extra=PATIENT,
    args=("--max-num-queued-reqs", "4", "--served-model-name", ALIAS),
)
CLUSTER = ClusterConfig(
    "engines-that-refuse", (REFUSING, PREFILL), (DECODE,), (*PATIENT_PROXY, "--strategy", "least-load")
)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url, ALIAS) as client:
        yield client


pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("cluster", [CLUSTER], ids=str, indirect=True)]


def health(cluster: Cluster) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{cluster.url}/health", timeout=10, **PLAIN_HTTP).json()
    return answer


def test_f19_f22_f23_busy_engines_beside_one_that_refuses(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    """A few requests more than either engine admits; all of them by the alias."""
    prompts = [random_prompt(200 + i, f"busy {i}") for i in range(16)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: client.complete(prompt).token_ids, prompts))
    assert answers == [reference.complete(prompt) for prompt in prompts]
    shown = health(cluster)
    assert shown["failures"] == {"prefill": {}, "decode": {}}
    refusing = cluster.prefill[0].url
    assert shown["withheld"]["prefill"][refusing].startswith("ejected: refused ")
    assert shown["withheld"]["prefill"][refusing].endswith("requests that others took: HTTP 401")
    assert list(shown["withheld"]["prefill"]) == [refusing]


def test_f19_a_wrong_request_gets_the_engines_answer(cluster: Cluster, client: Client) -> None:
    before = health(cluster)["withheld"]
    for wrong in ({"prompt": random_prompt(5000, "too long")}, {"prompt": "x", "temperature": -1}):
        response = client.http.post("/v1/completions", json={"model": ALIAS, "max_tokens": 4, **wrong})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "BadRequestError"
    assert health(cluster)["withheld"] == before


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_f21_prefills_that_are_aborted_are_made_again_at_once(
    cluster: Cluster, client: Client, reference: Reference, stream: bool
) -> None:
    prefill = cluster.prefill[1]
    before = health(cluster)["failures"]["prefill"].get("aborted", 0)
    prompts = [random_prompt(3000 + i, f"aborted {i} {stream}") for i in range(2)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(lambda p=prompt: client.complete(p, stream=stream).token_ids) for prompt in prompts]
        deadline = time.monotonic() + 60
        while prefill.metric("vllm:kv_cache_usage_perc") < 0.02:
            assert time.monotonic() < deadline, "nothing was prefilled"
            time.sleep(0.01)
        httpx.post(f"{prefill.url}/pause?mode=abort", timeout=30, **PLAIN_HTTP).raise_for_status()
        begun = time.monotonic()
        httpx.post(f"{prefill.url}/resume", timeout=30, **PLAIN_HTTP).raise_for_status()
        answers = [answer.result() for answer in asked]
    assert answers == [reference.complete(prompt) for prompt in prompts]
    assert health(cluster)["failures"]["prefill"]["aborted"] > before
    assert time.monotonic() - begun < 25, "decode waits for its blocks for 30 s"
    wait_all_blocks_free(cluster)
