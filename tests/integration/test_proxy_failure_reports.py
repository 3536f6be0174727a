# SPDX-License-Identifier: Apache-2.0
"""Failures that a decode engine reports to the metaserver: what they end, and what the client gets."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_standin import PrefillEngine, make_failure, make_ticket
from proxy_cluster import STREAM, Cluster, beside, counted

from vllm_ascend_pd.core.protocol import METASERVER_PATH

FAILURE_PATH = METASERVER_PATH + "/failure"
EITHER = pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])


@EITHER
def test_decode_reports_a_prefill_that_hangs(stream: dict[str, Any]) -> None:
    """A new decode request follows, whose prefill another engine computes."""
    frozen = PrefillEngine()
    frozen.hangs = True
    with beside(prefill=frozen) as cluster, ThreadPoolExecutor(1) as client:
        answer = client.submit(cluster.complete, **stream)
        assert frozen.working.wait(5)
        cluster.report_failure("prefill rank 0 went silent")
        assert answer.result().status_code == 200
        assert frozen.cancelled.wait(5)
        (served,) = cluster.prefill.received
        assert served.headers["x-request-id"] != frozen.received[0].headers["x-request-id"]
        assert len(cluster.decode.received) == 2
        assert counted(cluster)[0] == {"prefill": 0, "decode": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"request_id": "cmpl-x-0"}', 400),
        (b" " * 70_000, 413),
        (json.dumps(make_failure(make_ticket("cmpl-x-0", "t"), "why")).encode(), 404),
    ],
)
def test_invalid_failure_reports_are_refused(idle_cluster: Cluster, body: bytes, status: int) -> None:
    assert idle_cluster.client.post(FAILURE_PATH, content=body).status_code == status


def test_reason_in_the_middle_of_a_stream(cluster: Cluster) -> None:
    cluster.decode.fails_after_first_token = True
    cluster.decode.explains = "prefill rank 1 went silent"
    response = cluster.complete(stream=True)
    token, error, done = response.text.strip().split("\n\n")
    assert "ÿ 0" in json.loads(token.removeprefix("data: "))["text"]
    shown = json.loads(error.removeprefix("data: "))["error"]
    assert (shown["message"], shown["code"]) == ("KV transfer failed: prefill rank 1 went silent", 502)
    assert done == "data: [DONE]"
    assert len(cluster.decode.received) == 1
    assert counted(cluster)[1]["decode"] == {"transfer failed": 1}
