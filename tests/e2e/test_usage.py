# SPDX-License-Identifier: Apache-2.0
"""`usage` says what a single engine says: on all routes, streams or not, whichever engine has a prompt cached. And a
prompt that decode has cached as a whole is answered without prefill."""

import dataclasses

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import Cluster, one_to_one
from harness.engines import EngineConfig
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference
from harness.usage import RESETTABLE, asked_of_all, cached_tokens, forget, usages
from harness.waiting import wait_until

DETAILED = EngineConfig(args=("--enable-prompt-tokens-details",), env=RESETTABLE)

pytestmark = [
    pytest.mark.parametrize(
        "cluster",
        [dataclasses.replace(one_to_one(1, 1, engine=DETAILED), name="with-prompt-tokens-details")],
        ids=str,
        indirect=True,
    ),
    pytest.mark.timeout(600),
]

BLOCK = 128


def test_usage_is_a_single_engines(cluster: Cluster, reference: Reference) -> None:
    model, single = str(cluster.model), reference.engine
    forget(*cluster.prefill, *cluster.decode, single)
    for which, cold in (
        ("neither engine has the prompts cached", ()),
        ("both have", ()),
        ("prefill has", cluster.decode),
        ("decode has, and prefill computes them once more", (*cluster.prefill, single)),
    ):
        forget(*cold)
        said = asked_of_all(cluster.url, model)
        expected = asked_of_all(single.url, model)
        assert said == expected, which
        total = sum(cached_tokens(usage[-1]) for usage in said.values())
        assert (total > 0) == (which.startswith(("both", "prefill"))), which


def test_lists_of_prompts_and_samples(cluster: Cluster, reference: Reference) -> None:
    prompts = [random_prompt(tokens, "usage of a list") for tokens in (200, 300, 400)]
    bodies = [
        {"prompt": prompts},
        {"prompt": prompts},
        {"prompt": prompts[2], "n": 3, "temperature": 1, "top_k": 1},
    ]
    for body in bodies:
        said, expected = (
            usages(url, str(cluster.model), "/v1/completions", {"max_tokens": 8, "ignore_eos": True, **body})
            for url in (cluster.url, reference.engine.url)
        )
        assert said == expected


@pytest.mark.parametrize("tokens", [2 * BLOCK, 2 * BLOCK + 1])
def test_a_prompt_that_decode_has_cached_as_a_whole(cluster: Cluster, reference: Reference, tokens: int) -> None:
    """It needs no ticket, and counts as in a single engine."""
    body = {"prompt": random_prompt(tokens, "usage of all"), "max_tokens": 8, "ignore_eos": True}
    issued = "vllm:kv_pd_ticket_to_ready_seconds_count"
    for prefills in (1, 0):
        before = cluster.decode[0].metric(issued)
        said = usages(cluster.url, str(cluster.model), "/v1/completions", body)
        assert said == usages(reference.engine.url, str(cluster.model), "/v1/completions", body)
        if prefills:
            wait_until(lambda before=before: cluster.decode[0].metric(issued) == before + 1, 30)
    assert cluster.decode[0].metric(issued) == before


def test_decode_answers_alone_when_prefill_is_down(cluster: Cluster, client: Client, reference: Reference) -> None:
    """The last test here: the cluster has no prefill engine after it."""
    cached = {tokens: random_prompt(tokens, "down") for tokens in (BLOCK, 3 * BLOCK, 3 * BLOCK + 1)}
    expected = {tokens: reference.complete(prompt) for tokens, prompt in cached.items()}
    assert {tokens: client.complete(prompt).token_ids for tokens, prompt in cached.items()} == expected
    cluster.prefill[0].process.kill()
    assert httpx.get(f"{cluster.url}/health", timeout=30, **PLAIN_HTTP).status_code == 503
    for stream in (False, True):
        again = {tokens: client.complete(prompt, stream=stream).token_ids for tokens, prompt in cached.items()}
        assert again == expected
    with pytest.raises(httpx.HTTPStatusError, match="prefill"):
        client.complete(random_prompt(3 * BLOCK, "never seen"))
