# SPDX-License-Identifier: Apache-2.0
"""A decode engine that computes no prompts (`who_computes: never`) and has few blocks: it preempts again and again,
prefill computes everything, and clients get a single engine's tokens."""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from harness.client import Client, Completion, StreamError, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.engines import EngineConfig, Role, wait_ready
from harness.failures import wait_all_blocks_free
from harness.models import TINY
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference, long
from harness.usage import SAYS_CACHED, asks_for, usages

BLOCK = 32
ANSWER = 250
"""Tokens."""
PLACED = "vllm:kv_pd_prompts_total"
# Short, so that a writer that died is not waited for long.
TIMES = (("lease_s", 10.0), ("write_timeout_s", 5.0), ("grant_timeout_s", 20.0))

PREFILL = EngineConfig(
    Role.PREFILL, block_size=BLOCK, max_model_len=640, max_num_batched_tokens=32, connector_extra=TIMES
)
DECODE = EngineConfig(
    Role.DECODE,
    block_size=BLOCK,
    max_model_len=640,
    kv_cache_bytes=24 * BLOCK * TINY.kv_bytes_per_token,
    load_failure_policy="recompute",
    connector_extra=(*TIMES, ("who_computes", "never")),
    args=("--max-num-seqs", "8"),
)
# A preempted request whose prefill engine dies asks again. Policy `fail` is in tests/npu/e2e/test_prefill_only.py.
CLUSTER = ClusterConfig(
    "prefill-only-recompute",
    (PREFILL, PREFILL),
    (DECODE,),
    (),  # a proxy that is not as patient as others
    single=EngineConfig(block_size=BLOCK, max_model_len=640),
)
NGRAM = (("method", "ngram"), ("num_speculative_tokens", 3), ("prompt_lookup_min", 1), ("prompt_lookup_max", 3))
SPECULATIVE = dataclasses.replace(
    CLUSTER,
    name="prefill-only-ngram",
    prefill=(PREFILL,),
    decode=(dataclasses.replace(DECODE, speculative=NGRAM),),
)

pytestmark = pytest.mark.timeout(900)
plain = pytest.mark.parametrize("cluster", [CLUSTER], ids=str, indirect=True)
speculative = pytest.mark.parametrize("cluster", [long(SPECULATIVE)], ids=str, indirect=True)


def preemptions(cluster: Cluster) -> float:
    return cluster.decode[0].metric("vllm:num_preemptions_total")


def prompts_of(name: str, count: int = 12) -> list[list[int]]:
    return [random_prompt(40 + 13 * i, f"{name}-{i}") for i in range(count)]


def storm(pool: ThreadPoolExecutor, client: Client, prompts: list[list[int]]) -> list[Future[Completion]]:
    """Answers that need most of decode's blocks each. Half of them are streams."""
    return [pool.submit(client.complete, prompt, ANSWER, stream=bool(i % 2)) for i, prompt in enumerate(prompts)]


def check(cluster: Cluster, reference: Reference, prompts: list[list[int]], answers: list[Completion]) -> None:
    """The answers are right, nothing is left in the engines, and decode has computed no prompt."""
    with Client(reference.engine.url) as alone:
        expected = at_once(lambda prompt: alone.complete(prompt, ANSWER).token_ids, prompts, concurrency=len(prompts))
    assert [answer.token_ids for answer in answers] == expected
    wait_all_blocks_free(cluster)
    [decode] = cluster.decode
    placed = {(labels["by"], labels["reason"]) for labels, count in decode.samples(PLACED) if count}
    assert {reason for by, reason in placed if by == "decode"} <= {"cached"}
    assert {("prefill", "policy"), ("prefill", "preempted")} <= placed


@speculative
def test_a_storm_of_preemptions_with_drafts(cluster: Cluster, client: Client, reference: Reference) -> None:
    before = preemptions(cluster)
    prompts = prompts_of("storm")
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [answer.result() for answer in storm(pool, client, prompts)]
    assert preemptions(cluster) >= before + 6
    check(cluster, reference, prompts, answers)


@plain
def test_samples_of_one_prompt_are_preempted(cluster: Cluster, client: Client, reference: Reference) -> None:
    before = preemptions(cluster)
    prompts = prompts_of("samples", 3)
    answers = client.complete_many(prompts, 250, n=2)
    assert preemptions(cluster) > before
    check(cluster, reference, [prompt for prompt in prompts for _ in range(2)], answers)


@plain
def test_usage_after_preemptions(cluster: Cluster, reference: Reference) -> None:
    """What prefill has computed for an earlier ticket of a request does not count as cached."""
    before = preemptions(cluster)
    texts = [f"{i}: " + "what comes after layer 7? " * (4 + i) for i in range(8)]
    bodies = [asks_for(text, bool(i % 2), ANSWER) for i, text in enumerate(texts)]
    said, expected = (
        at_once(lambda body, url=url: usages(url, str(cluster.model), SAYS_CACHED, body), bodies, concurrency=8)
        for url in (cluster.url, reference.engine.url)
    )
    assert said == expected
    assert preemptions(cluster) > before
    wait_all_blocks_free(cluster)


@plain
def test_prefill_killed_in_a_storm(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Streams that had tokens go on when the other engine has computed theirs, by a ticket of their own."""
    killed = cluster.prefill[0]
    before = preemptions(cluster)
    prompts = prompts_of("killed")
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = storm(pool, client, prompts)
        while preemptions(cluster) < before + 3 or not killed.metric("vllm:num_requests_running"):
            assert not all(answer.done() for answer in asked)
            time.sleep(0.01)
        killed.process.kill()
        errors = [answer.exception() for answer in asked]
    killed.start()
    wait_ready([killed])
    assert errors == len(prompts) * [None]
    check(cluster, reference, prompts, [answer.result() for answer in asked])


@plain
def test_log_probabilities_of_a_prompt_are_refused_with_the_reason(cluster: Cluster, client: Client) -> None:
    with pytest.raises(httpx.HTTPStatusError) as refused:
        client.complete(random_prompt(100, "logprobs"), prompt_logprobs=1)
    assert refused.value.response.status_code == 400
    assert "who_computes: never" in refused.value.response.text
    wait_all_blocks_free(cluster)


@plain
def test_a_request_past_the_proxy_ends_with_an_error(cluster: Cluster, client: Client, reference: Reference) -> None:
    [decode] = cluster.decode
    body = {"model": client.model, "prompt": random_prompt(100, "direct"), "max_tokens": 4}
    answer = httpx.post(f"{decode.url}/v1/completions", json=body, timeout=60, **PLAIN_HTTP)
    assert answer.status_code == 500
    assert "the request names no metaserver" in decode.log.read_text()
    prompts = prompts_of("after", 1)
    check(cluster, reference, prompts, [client.complete(prompts[0], ANSWER)])


@speculative
def test_the_only_prefill_engine_is_killed_in_a_storm(cluster: Cluster, client: Client, reference: Reference) -> None:
    """With `kv_load_failure_policy` recompute, too: whoever needs it ends with the reason, and nothing waits."""
    [prefill] = cluster.prefill
    before = preemptions(cluster)
    prompts = prompts_of("alone")
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = storm(pool, client, prompts)
        while preemptions(cluster) < before + 2:
            assert not all(answer.done() for answer in asked)
            time.sleep(0.01)
        prefill.process.kill()
        errors = [answer.exception() for answer in asked]
    failed = [error for error in errors if error is not None]
    assert failed
    assert all(isinstance(error, StreamError | httpx.HTTPStatusError) for error in failed)
    assert all("prefill" in str(error) for error in failed)
    prefill.start()
    wait_ready([prefill])
    prompts = prompts_of("back", 2)
    check(cluster, reference, prompts, [client.complete(prompt, ANSWER) for prompt in prompts])
