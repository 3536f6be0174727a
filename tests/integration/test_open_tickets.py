# SPDX-License-Identifier: Apache-2.0
"""The proxy's answers to a decode engine that asks which tickets wait."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from proxy_cluster import Cluster, eventually, running_cluster

from vllm_ascend_pd.core.protocol import MAX_ASKED, METASERVER_PATH, WAITING_SUFFIX, WaitingAnswer

PATH = METASERVER_PATH + WAITING_SUFFIX


def test_a_ticket_waits_until_its_prefill_has_ended() -> None:
    with running_cluster(max_per_prefill=1) as cluster, ThreadPoolExecutor(2) as clients:
        cluster.prefill.holds = True
        cluster.decode.waits = 1.0
        answers = [clients.submit(cluster.complete) for _ in range(2)]
        eventually(lambda: len(cluster.decode.tickets) == 2)
        # The stand-in's tickets have the same id: one is at prefill, one in the proxy's line.
        question = {"ticket_ids": ["ticket-0", "unknown"]}
        eventually(lambda: cluster.client.post(PATH, json=question).json() == {"waiting": ["ticket-0"]})
        cluster.prefill.holds = False
        eventually(lambda: cluster.client.post(PATH, json=question).json() == {"waiting": []})
        assert [answer.result().status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{}",
        b'{"ticket_ids": "t"}',
        b'{"ticket_ids": [1]}',
        json.dumps({"ticket_ids": ["t" * 65]}).encode(),
        json.dumps({"ticket_ids": ["t"] * (MAX_ASKED + 1)}).encode(),
        b" " * (128 * 1024 + 1),
    ],
)
def test_made_up_questions(idle_cluster: Cluster, body: bytes) -> None:
    answer = idle_cluster.client.post(PATH, content=body)
    assert answer.status_code == (413 if len(body) > 128 * 1024 else 400)
    assert "question" in answer.json()["error"]


def test_the_largest_question(idle_cluster: Cluster) -> None:
    """Decode reads 64 KiB of an answer."""
    answer = idle_cluster.client.post(PATH, json={"ticket_ids": ["t" * 64] * MAX_ASKED})
    assert answer.json() == {"waiting": []}
    assert len(msgspec.json.encode(WaitingAnswer([secrets.token_hex(16)] * MAX_ASKED))) < 64 * 1024
