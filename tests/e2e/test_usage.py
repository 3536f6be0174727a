# SPDX-License-Identifier: Apache-2.0
"""`usage` says what a single engine says: on all routes, streams or not, whichever engine has a prompt cached."""

from collections import Counter
from typing import Any

import pytest
from test_who_computes import TUNED

from harness.client import Client, random_prompt
from harness.clusters import TP2_TO_TP1, Cluster
from harness.engines import Engine
from harness.pool import Reference
from harness.usage import SAYS_CACHED, asked_of_all, cached_tokens, forget
from harness.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
with_details = pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True)
without_details = pytest.mark.parametrize("cluster", [TUNED], ids=str, indirect=True)

BLOCK = 128
DETAILS = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Of `/v1/messages`, whose `input_tokens` are those that neither has."""


@without_details
def test_usage_without_the_details_of_prompt_tokens(cluster: Cluster, reference: Reference) -> None:
    """One route says what was cached nevertheless."""

    def but_for_details(usages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        left_out = [{**usage, "prompt_tokens_details": None} for usage in usages]
        for usage in left_out:
            usage["input_tokens"] = usage.get("input_tokens", 0) + sum(usage.pop(name, None) or 0 for name in DETAILS)
        return left_out

    for which in ("cold", "warm"):
        said = asked_of_all(cluster.url, str(cluster.model), "without details: ")
        single = asked_of_all(reference.engine.url, str(cluster.model), "without details: ")
        assert {asked: but_for_details(usage) for asked, usage in said.items()} == {
            asked: but_for_details(usage) for asked, usage in single.items()
        }, which
        says_cached = {path for (path, _), usage in said.items() if cached_tokens(usage[-1])}
        assert says_cached == ({SAYS_CACHED} if which == "warm" else set())


@with_details
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


def cached_prompts(engine: Engine) -> Counter[str]:
    """Returns vLLM's metrics of cached prompts, those of which docs/metrics.md has a table."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits")
    found = Counter({name: engine.metric(f"vllm:{name}_total") for name in (*names, "prompt_tokens_cached")})
    by_source = engine.samples("vllm:prompt_tokens_by_source_total")
    found.update({f"prompt_tokens_by_source {labels['source']}": value for labels, value in by_source})
    found["computed"] = engine.metric("vllm:request_prefill_kv_computed_tokens_sum")
    found["prompts"] = engine.metric("vllm:request_prefill_kv_computed_tokens_count")
    return found


@with_details
def test_vllms_metrics_of_cached_prompts(cluster: Cluster, client: Client) -> None:
    """They count what docs/metrics.md says."""
    [prefill], [decode] = cluster.prefill, cluster.decode
    first = random_prompt(3 * BLOCK + 40, "metrics")
    more = first[: 3 * BLOCK] + random_prompt(2 * BLOCK, "metrics of more")
    whole = random_prompt(2 * BLOCK + 1, "metrics of all")

    def counted(prompt: list[int], *asked: Engine) -> list[Counter[str]]:
        """Sends the prompt. Returns what prefill and decode have counted more, once those that are asked have."""
        before = {engine: cached_prompts(engine) for engine in (prefill, decode)}
        client.complete(prompt)
        for engine in asked:
            wait_until(lambda engine=engine: cached_prompts(engine)["prompts"] == before[engine]["prompts"] + 1, 30)
        return [cached_prompts(engine) - before[engine] for engine in before]

    counted(first, prefill, decode)
    forget(decode)
    counted(whole, prefill, decode)
    # Prefill has three blocks of it, decode none.
    on_prefill, on_decode = counted(first, prefill, decode)
    assert on_decode == {
        "prompts": 1,
        "prefix_cache_queries": len(first),
        "external_prefix_cache_queries": len(first),
        "external_prefix_cache_hits": len(first),
        "prompt_tokens_by_source external_kv_transfer": len(first),
        "prompt_tokens_cached": 3 * BLOCK,
        "computed": 40,
    }
    assert (on_prefill["prefix_cache_queries"], on_prefill["prefix_cache_hits"]) == (len(first), 3 * BLOCK)
    # Both have three blocks of it.
    _, on_decode = counted(more, prefill, decode)
    assert on_decode == {
        "prompts": 1,
        "prefix_cache_queries": len(more),
        "prefix_cache_hits": 3 * BLOCK,
        "external_prefix_cache_queries": 2 * BLOCK,
        "external_prefix_cache_hits": 2 * BLOCK,
        "prompt_tokens_by_source local_cache_hit": 3 * BLOCK,
        "prompt_tokens_by_source external_kv_transfer": 2 * BLOCK,
        "prompt_tokens_cached": 3 * BLOCK,
        "computed": 2 * BLOCK,
    }
    # Decode has all but its last token, and computes that one.
    on_prefill, on_decode = counted(whole, decode)
    assert not on_prefill
    assert on_decode == {
        "prompts": 1,
        "prefix_cache_queries": len(whole),
        "prefix_cache_hits": 2 * BLOCK,
        "external_prefix_cache_queries": 1,
        "prompt_tokens_by_source local_cache_hit": 2 * BLOCK,
        "prompt_tokens_by_source local_compute": 1,
        "prompt_tokens_cached": 2 * BLOCK,
        "computed": 1,
    }
