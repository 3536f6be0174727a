# SPDX-License-Identifier: Apache-2.0
"""The status page's resources over real HTTP: who may see what, and what nobody sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from proxy_cluster import COMPLETION, STREAM, Cluster, eventually, running_cluster

FILES = {
    "/": "text/html; charset=utf-8",
    "/status.css": "text/css; charset=utf-8",
    "/status.js": "text/javascript; charset=utf-8",
    "/status.svg": "image/svg+xml",
}


def status(cluster: Cluster) -> dict[str, Any]:
    answer = cluster.client.get("/status.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def phases(cluster: Cluster) -> dict[str, int]:
    return {phase: number for phase, number in status(cluster)["requests"]["phases"].items() if number}


def test_browser_loads_nothing_from_elsewhere_and_guesses_nothing(cluster: Cluster) -> None:
    for path, media_type in {**FILES, "/status.json": "application/json"}.items():
        answer = cluster.client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
        policy = answer.headers["content-security-policy"].split("; ")
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert not any("unsafe" in each or "http" in each or "*" in each for each in policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
    assert cluster.client.post("/status.json").status_code == 405


def test_with_an_admin_token_the_figures_need_it(token_file: str) -> None:
    with running_cluster(admin_token_file=token_file) as cluster:
        for path in FILES:
            answer = cluster.client.get(path)
            assert answer.status_code == 200
            assert cluster.decode_url not in answer.text
        for given in ({}, {"Authorization": "Bearer a-secre"}, {"Authorization": "a-secret"}):
            refused = cluster.client.get("/status.json", headers=given)
            assert refused.status_code == 401
            assert cluster.decode_url not in refused.text
        answer = cluster.client.get("/status.json", headers={"Authorization": "Bearer a-secret"})
        assert answer.status_code == 200
        assert cluster.decode_url in answer.text
        assert "a-secret" not in answer.text


def test_requests_are_followed_from_phase_to_phase() -> None:
    with running_cluster(max_per_decode=1) as cluster:
        cluster.prefill.holds = True
        cluster.decode.hangs_after_first_token = True
        first = cluster.send_only("/v1/completions", {**COMPLETION, **STREAM})
        eventually(lambda: phases(cluster) == {"prefill": 1})
        second = cluster.send_only("/v1/completions", {**COMPLETION, **STREAM})
        eventually(lambda: phases(cluster) == {"prefill": 1, "queued": 1})
        prefill, decode = status(cluster)["roles"]
        assert (prefill["waiting"], decode["waiting"], decode["seats_per_engine"]) == (0, 1, 1)
        assert [engine["in_flight"] for engine in prefill["engines"]] == [1]
        assert [engine["seats_taken"] for engine in decode["engines"]] == [1]
        cluster.prefill.holds = False
        eventually(lambda: phases(cluster) == {"answering": 1, "queued": 1})
        first.close()
        eventually(lambda: phases(cluster) == {"answering": 1})
        second.close()
        eventually(lambda: phases(cluster) == {})


def refuse(engine: Any) -> None:
    engine.refusal = (500, {"error": {"message": "cannot compute: the quick brown fox", "code": 500}})


def say_it_as_first_event(engine: Any) -> None:
    engine.first_events = [{"error": {"message": "cannot compute: the quick brown fox", "code": 500}}]


@pytest.mark.usefixtures("no_reason_comes")
@pytest.mark.parametrize(
    ("role", "break_it", "reason"),
    [
        ("prefill", refuse, "HTTP 500 from the prefill engine"),
        ("decode", refuse, "HTTP 500"),
        ("decode", say_it_as_first_event, "an error, 500, as the first event"),
    ],
)
def test_words_of_an_engine_that_may_repeat_a_prompt_are_not_shown(
    role: str, break_it: Callable[[Any], None], reason: str
) -> None:
    with running_cluster(attempts=1) as cluster:
        break_it(getattr(cluster, role))
        cluster.complete(**STREAM)
        text = cluster.client.get("/status.json").text
        assert "quick brown fox" not in text
        failures = status(cluster)["failures"]
        assert {failure["reason"] for failure in failures} == {reason}
        assert failures[-1]["engine"] == getattr(cluster, f"{role}_url")
        [received] = cluster.decode.received
        request_id = received.headers["x-request-id"]
        assert failures[-1]["request"] == request_id[:8]
        assert request_id not in text
