# SPDX-License-Identifier: Apache-2.0
"""What engines answer besides tokens: one prefill engine refuses everybody, the other engines admit few requests or few
tokens and abort some, and decode has a name for the model that prefill does not know. Clients get a single engine's
tokens.

vLLM's CPU backend has no sleep mode, but what sleeping does to requests: it aborts them, and goes on when it wakes up.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import PATIENT_PROXY, Cluster, ClusterConfig
from harness.engines import PATIENT, Engine, EngineConfig, Role, wait_ready
from harness.failures import wait_all_blocks_free
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference
from harness.proxy_state import counted, withheld
from harness.waiting import wait_until

ALIAS = "an-alias"
REFUSING = EngineConfig(Role.PREFILL, connector_extra=PATIENT, env=(("VLLM_API_KEY", "of-nobody"),))
PREFILL = EngineConfig(
    Role.PREFILL,
    max_num_batched_tokens=64,
    connector_extra=PATIENT,
    args=("--max-num-queued-reqs", "4", "--max-num-queued-tokens", "1000"),
    env=(("VLLM_SERVER_DEV_MODE", "1"),),
)
DECODE = EngineConfig(
    Role.DECODE,
    connector_extra=PATIENT,
    args=("--max-num-queued-reqs", "14", "--max-num-queued-tokens", "7000", "--served-model-name", ALIAS),
    env=(("VLLM_SERVER_DEV_MODE", "1"),),
)
CLUSTER = ClusterConfig("engines-that-refuse", (REFUSING, PREFILL), (DECODE,), PATIENT_PROXY)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url, ALIAS) as client:
        yield client


pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("cluster", [CLUSTER], ids=str, indirect=True)]


def rejections(engine: Engine) -> float:
    """How many requests the engine has not admitted."""
    samples = engine.samples("http_requests_total")
    return sum(value for labels, value in samples if labels["status"] == "5xx")


@pytest.mark.parametrize(
    ("tokens", "busy"), [(60, ("decode",)), (600, ("decode", "prefill"))], ids=["requests", "tokens"]
)
def test_busy_engines_beside_one_that_refuses(
    cluster: Cluster, client: Client, reference: Reference, tokens: int, busy: tuple[str, ...]
) -> None:
    """A few requests more than either engine admits, or tokens; all of them by the alias."""
    engines = {"prefill": cluster.prefill[1], "decode": cluster.decode[0]}
    before = [rejections(engines[side]) for side in busy]
    prompts = [random_prompt(tokens + i, f"busy {i}") for i in range(16)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: client.complete(prompt).token_ids, prompts))
    assert answers == [reference.complete(prompt) for prompt in prompts]
    after = [rejections(engines[side]) for side in busy]
    assert all(now > then for now, then in zip(after, before, strict=True)), (before, after)
    assert counted(cluster.url)[1] == {"prefill": {}, "decode": {}}
    passed_over = f"prefill engine {cluster.prefill[0].url} is passed over for a while: "
    assert (
        f"{passed_over}3 requests in a row failed there: refused what others took: HTTP 401"
        in cluster.proxy.log.read_text()
    )
    assert {*withheld(cluster.url)["prefill"]} <= {cluster.prefill[0].url}


def test_a_wrong_request_gets_the_engines_answer(cluster: Cluster, client: Client) -> None:
    for wrong in ({"prompt": random_prompt(5000, "too long")}, {"prompt": "x", "temperature": -1}):
        response = client.http.post("/v1/completions", json={"model": ALIAS, "max_tokens": 4, **wrong})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "BadRequestError"
    assert cluster.prefill[1].url not in withheld(cluster.url)["prefill"]


@pytest.mark.parametrize(
    ("abort", "go_on", "stream"),
    [("pause?mode=abort", "resume", False), ("sleep?level=1", "wake_up", True)],
    ids=["paused-json", "asleep-stream"],
)
def test_aborted_prefills_are_tried_again_at_once(
    cluster: Cluster, client: Client, reference: Reference, abort: str, go_on: str, stream: bool
) -> None:
    prefill = cluster.prefill[1]
    before = counted(cluster.url)[1]["prefill"].get("aborted", 0)
    prompts = [random_prompt(3000 + i, f"aborted {i} {stream}") for i in range(2)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(lambda p=prompt: client.complete(p, stream=stream).token_ids) for prompt in prompts]
        deadline = time.monotonic() + 60
        while prefill.metric("vllm:kv_cache_usage_perc") < 0.02:
            assert time.monotonic() < deadline, "nothing was prefilled"
            time.sleep(0.01)
        httpx.post(f"{prefill.url}/{abort}", timeout=30, **PLAIN_HTTP).raise_for_status()
        begun = time.monotonic()
        httpx.post(f"{prefill.url}/{go_on}", timeout=30, **PLAIN_HTTP).raise_for_status()
        answers = [answer.result() for answer in asked]
    assert answers == [reference.complete(prompt) for prompt in prompts]
    assert counted(cluster.url)[1]["prefill"]["aborted"] > before
    assert time.monotonic() - begun < 25, "decode waits for its blocks for 30 s"
    wait_all_blocks_free(cluster)


def test_a_decode_engine_sleeps_and_receives_again_when_it_is_awake(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    """vLLM's CPU backend frees nothing, but vLLM makes the same calls."""
    [prefill, decode] = cluster.prefill[1], cluster.decode[0]
    httpx.post(f"{decode.url}/sleep?level=1", timeout=30, **PLAIN_HTTP).raise_for_status()
    wait_until(lambda: withheld(cluster.url)["decode"] == {decode.url: "ejected: it sleeps"}, 30)
    httpx.post(f"{decode.url}/wake_up", timeout=30, **PLAIN_HTTP).raise_for_status()
    wait_until(lambda: withheld(cluster.url)["decode"] == {}, 30)
    computed = prefill.metric("vllm:prompt_tokens_total")
    prompt = random_prompt(3000, "after a sleep")
    assert client.complete(prompt).token_ids == reference.complete(prompt)
    assert prefill.metric("vllm:prompt_tokens_total") - computed >= 2999
    assert "describes itself anew" in decode.process.log.read_text()


def test_the_engine_that_refused_comes_back_when_it_serves_again(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    """The last test here: it refuses nobody after it."""
    refusing = cluster.prefill[0]
    refusing.process.stop()
    del refusing.environment["VLLM_API_KEY"]
    refusing.start()
    wait_ready([refusing])
    numbers = itertools.count()

    def serves() -> bool:
        prompt = random_prompt(200, f"again {next(numbers)}")
        assert client.complete(prompt).token_ids == reference.complete(prompt)
        return refusing.metric("vllm:prompt_tokens_total") > 0

    wait_until(serves, 120)
    assert withheld(cluster.url)["prefill"] == {}
