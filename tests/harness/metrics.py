# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` of real engines and of the proxy must say of requests that they served, on every backend."""

from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster
from harness.plain_http import PLAIN_HTTP
from harness.waiting import wait_for
from vllm_ascend_pd.observe.stats import PREFIX

Metrics = dict[str, float]


def scraped(url: str) -> Metrics:
    """Ours, without the prefix; summed over labels."""
    found: Metrics = {}
    text = httpx.get(f"{url}/metrics", timeout=10, **PLAIN_HTTP).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix(PREFIX)
                found[name] = found.get(name, 0.0) + sample.value
    return found


def grown(before: Metrics, after: Metrics) -> Metrics:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def until(url: str, before: Metrics, enough: Callable[[Metrics], bool]) -> Metrics:
    """What has changed since `before` as soon as that is enough: engines tell their front ends step by step."""
    return wait_for(lambda: grown(before, scraped(url)), enough, 30, every_s=0.1)


def requests_are_seen_everywhere(cluster: Cluster, client: Client) -> None:
    """On prefill, whose ranks' heads are regrouped, on decode and on the proxy."""
    ranks = cluster.config.prefill[0].tp * cluster.config.prefill[0].pp
    prefill, decode, proxy = cluster.prefill[0].url, cluster.decode[0].url, cluster.url
    before = [scraped(url) for url in (prefill, decode, proxy)]
    prompts = [random_prompt(tokens, "metrics") for tokens in (100, 400, 1500)]
    completions = at_once(client.complete, prompts, concurrency=3)
    count = len(completions)
    received = sum(completion.kv_transfer_params["received_bytes"] for completion in completions)
    assert received > 0

    # A rank may have no unit of a step, or of a whole request: it regroups with the others and writes nothing.
    on_prefill = until(
        prefill,
        before[0],
        lambda change: change["pushed_bytes_total"] == received and change["overlap_ratio_count"] >= count,
    )
    assert 0 < on_prefill["layer_push_seconds_count"] <= on_prefill["regroup_wait_seconds_count"]
    assert 0 <= on_prefill["overlap_ratio_sum"] <= on_prefill["overlap_ratio_count"] <= ranks * count
    assert on_prefill["push_failures_total"] == on_prefill["write_retries_total"] == 0
    idle = scraped(prefill)
    assert idle.get("push_queue_depth", 0) == idle.get("grants_waiting", 0) == 0
    assert not {"ticket_to_ready_seconds_count", "receive_failures_total"} & idle.keys(), "those are decode's"

    on_decode = until(decode, before[1], lambda change: change["ticket_to_ready_seconds_count"] == count)
    assert on_decode["ticket_to_ready_seconds_sum"] > 0
    assert on_decode["receive_failures_total"] == 0
    assert "pushed_bytes_total" not in on_decode

    client.complete(random_prompt(300, "metrics-stream"), stream=True)
    on_proxy = until(proxy, before[2], lambda change: change["proxy_requests_total"] > count)
    assert on_proxy["proxy_requests_total"] == count + 1
    # Decode may have all KV, and be done, before prefill's front end has answered: then nobody waits for that any more.
    assert 0 < on_proxy["proxy_prefill_seconds_count"] <= count + 1
    assert on_proxy["proxy_time_to_first_token_seconds_count"] == 1, "of the stream"
    assert on_proxy["proxy_failures_total"] == 0
    now = scraped(proxy)
    assert (now["proxy_requests_in_flight"], now["proxy_tickets_waiting"], now["proxy_engine_up"]) == (0, 0, 2)
