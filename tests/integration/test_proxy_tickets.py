# SPDX-License-Identifier: Apache-2.0
"""Forged tickets: a client learns its request's id from the response's headers."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from engine_standin import make_failure, make_ticket
from proxy_cluster import CHAT, eventually, running_cluster, running_proxy

from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.core.protocol import METASERVER_PATH


@pytest.mark.parametrize("samples", [1, 2])
def test_no_more_tickets_than_samples(samples: int) -> None:
    """All samples of a prompt have tickets under the same id. One ticket more must be forged."""
    with running_cluster() as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = True
        answer = client.submit(cluster.client.post, "/v1/chat/completions", json={**CHAT, "n": samples})
        eventually(lambda: len(cluster.prefill.received) == samples)
        ticket = cluster.decode.tickets[0]
        made_up = make_ticket(ticket["request_id"], "made-up")
        refused = cluster.client.post(METASERVER_PATH, json=made_up)
        assert (refused.status_code, "has all its tickets" in refused.json()["error"]) == (409, True)
        failure = make_failure(made_up, "why", final=True)
        assert cluster.client.post(METASERVER_PATH + "/failure", json=failure).status_code == 404
        cluster.prefill.holds = False
        assert answer.result().status_code == 200
        assert len(cluster.prefill.received) == samples


def test_the_log_tells_who_may_post_tickets(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-secret")

    def log(*options: str) -> str:
        nobody = "http://127.0.0.1:9"
        with running_proxy(nobody, "http://127.0.0.1:7", *options) as (process, port):
            assert httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30, **PLAIN_HTTP).status_code == 200
            process.send_signal(signal.SIGTERM)
            return process.communicate(timeout=30)[1]

    warning = "WARNING vllm_ascend_pd.proxy.server: any client that reaches this port may post tickets"
    assert warning in log()
    assert warning not in log("--metaserver-token-file", str(token))
    assert warning not in log("--metaserver-port", "0")
