# SPDX-License-Identifier: Apache-2.0
"""The proxy's `/metrics` over real HTTP, with stand-ins for vLLM engines."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from engine_standin import PrefillEngine
from prometheus_client.parser import text_string_to_metric_families
from proxy_cluster import CHAT, COMPLETION, STREAM, Cluster, beside, eventually, running_cluster

from harness.waiting import wait_for

PREFIX = "vllm:kv_pd_proxy_"
Samples = dict[tuple[str, ...], float]


def scraped(cluster: Cluster) -> Samples:
    """Values by (name without prefix, *label values in the order of the labels' names), without buckets."""
    answer = cluster.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.name.startswith(PREFIX) for family in families)
    return {
        (sample.name.removeprefix(PREFIX), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def when(cluster: Cluster, condition: Callable[[Samples], bool]) -> Samples:
    """Scrapes until the condition holds; returns that scrape."""
    return wait_for(lambda: scraped(cluster), condition, 20)


def test_requests_are_counted_and_timed() -> None:
    with running_cluster() as cluster, running_cluster() as other:
        before = time.monotonic()
        assert cluster.complete().status_code == 200
        assert cluster.complete(**STREAM).status_code == 200
        assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert cluster.client.get("/v1/models").status_code == 200
        assert cluster.client.post("/v1/completions", content=b"no JSON").status_code == 400
        samples = when(cluster, lambda s: s.get(("requests_total", "/v1/completions", "400")) == 1)
        took = time.monotonic() - before
        assert {key[1:]: value for key, value in samples.items() if key[0] == "requests_total"} == {
            ("/v1/completions", "200"): 2,
            ("/v1/completions", "400"): 1,
            ("/v1/chat/completions", "200"): 1,
            ("/v1/models", "200"): 1,
        }
        assert samples["request_duration_seconds_count", "/v1/completions"] == 3
        assert 0 < samples["request_duration_seconds_sum", "/v1/completions"] < took
        streams = {key for key in samples if key[0] == "time_to_first_token_seconds_count"}
        assert streams == {("time_to_first_token_seconds_count", "/v1/completions")}, "streams only"
        assert samples["time_to_first_token_seconds_count", "/v1/completions"] == 1
        assert samples["prefill_seconds_count",] == 3
        assert (samples["requests_in_flight",], samples["tickets_waiting",]) == (0, 0)
        up = {key[2]: value for key, value in samples.items() if key[0] == "engine_up"}
        assert up == {"prefill": 1, "decode": 1}
        assert not any(key[0] == "requests_total" for key in scraped(other)), "another proxy of this process"


def test_waiting_requests_and_tickets_are_shown() -> None:
    with running_cluster(max_concurrent=1, max_waiting=1) as cluster:
        cluster.prefill.hangs = True
        leaving = cluster.send_only("/v1/completions", COMPLETION)
        when(cluster, lambda s: (s["requests_in_flight",], s["tickets_waiting",]) == (1, 1))
        next_one = cluster.send_only("/v1/completions", COMPLETION)
        when(cluster, lambda s: s["requests_waiting",] == 1)
        full = cluster.complete()
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        reason = "the proxy serves 1 requests, 1 more wait, which is the limit: retry later"
        assert full.json()["error"]["message"] == reason
        next_one.close()
        when(cluster, lambda s: s["requests_waiting",] == 0)
        leaving.close()
        samples = when(cluster, lambda s: (s["requests_in_flight",], s["tickets_waiting",]) == (0, 0))
        samples = when(cluster, lambda s: ("requests_total", "/v1/completions", "499") in s)
        assert samples["requests_total", "/v1/completions", "499"] == 2
        assert samples["requests_total", "/v1/completions", "429"] == samples["refused_requests_total", "429"] == 1
        assert samples["refused_requests_total", "503"] == samples["prefill_seconds_count",] == 0


def test_slots_in_use_and_the_queue_are_shown() -> None:
    with running_cluster(max_per_prefill=1) as cluster:
        cluster.prefill.holds = True
        open_requests = [cluster.send_only("/v1/completions", COMPLETION) for _ in range(3)]
        samples = when(cluster, lambda s: s["queue_depth", "prefill"] == 2)
        assert samples["queue_depth", "decode"] == 0
        at_engines = {key[2]: value for key, value in samples.items() if key[0] == "engine_requests"}
        assert at_engines == {"prefill": 1, "decode": 3}
        cluster.prefill.holds = False
        assert [connection.getresponse().status for connection in open_requests] == [200, 200, 200]
        when(cluster, lambda s: s["queue_depth", "prefill"] == 0)
        when(cluster, lambda s: not any(value for key, value in s.items() if key[0] == "engine_requests"))


def test_failures_and_retries_are_counted() -> None:
    failing = PrefillEngine()
    failing.refusal = (500, {"error": "out of memory"})
    failing.healthy = False
    with beside(prefill=failing) as cluster:
        assert cluster.complete().status_code == 200
        samples = scraped(cluster)
        assert samples["failures_total", "server_error", "prefill"] == samples["retries_total", "decode"] == 1
        assert samples["failures_total", "transfer_failed", "decode"] == 1
        assert sum(value for key, value in samples.items() if key[0] in ("failures_total", "retries_total")) == 3
        assert samples["prefill_seconds_count",] == 1, "without the one that failed"
        up = sorted((key[2], value) for key, value in samples.items() if key[0] == "engine_up")
        assert up == [("decode", 1), ("prefill", 0), ("prefill", 1)]


# What Prometheus 2.42 (Debian 12) and 3 send.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3])
def test_metric_names_keep_their_colons_in_every_format(accept: str) -> None:
    with running_cluster() as cluster:
        assert cluster.complete().status_code == 200

        def names() -> set[str]:
            text = cluster.client.get("/metrics", headers={"Accept": accept}).text
            return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}

        eventually(lambda: PREFIX + "requests_total" in names())
        assert all(name.startswith(PREFIX) for name in names())
