# SPDX-License-Identifier: Apache-2.0
"""Tickets that the metaserver refuses: forged, malformed, too large, or without the token."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from engine_standin import make_failure, make_ticket
from proxy_cluster import CHAT, Cluster, eventually, running_cluster, running_proxy

from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.core.protocol import METASERVER_PATH, WAITING_SUFFIX
from vllm_ascend_pd.proxy.server import warn_of_posts
from vllm_ascend_pd.proxy.settings import ProxySettings
from vllm_ascend_pd.transport.secret_files import new_secret, write_new


@pytest.mark.parametrize("samples", [1, 2])
def test_no_more_tickets_than_samples(samples: int) -> None:
    """All samples of a prompt have tickets under the same id. One ticket more must be forged: clients learn the id from
    the response's headers."""
    with running_cluster() as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = True
        answer = client.submit(cluster.client.post, "/v1/chat/completions", json={**CHAT, "n": samples})
        eventually(lambda: len(cluster.prefill.received) == samples)
        ticket = cluster.decode.tickets[0]
        made_up = make_ticket(ticket["request_id"], "made-up")
        refused = cluster.client.post(METASERVER_PATH, json=made_up)
        assert (refused.status_code, "has all its tickets" in refused.json()["error"]) == (409, True)
        failure = make_failure(made_up, "why")
        assert cluster.client.post(METASERVER_PATH + "/failure", json=failure).status_code == 404
        cluster.prefill.holds = False
        assert answer.result().status_code == 200
        assert len(cluster.prefill.received) == samples


def test_the_log_tells_who_may_post_tickets(token_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warned(host: str, **given: str) -> bool:
        caplog.clear()
        warn_of_posts(ProxySettings(host=host, prefill=["http://p:1"], decode=["http://d:1"], **given))
        return "may post tickets" in caplog.text

    assert not warned("127.0.0.1")
    assert warned("10.0.0.1")
    assert not warned("10.0.0.1", metaserver_token_file=token_file)
    write_new(tmp_path / "secret", new_secret())
    assert not warned("10.0.0.1", secret_file=str(tmp_path / "secret"))


def test_a_default_start_warns_of_nothing_and_the_end_is_logged() -> None:
    with running_proxy("http://127.0.0.1:9", "http://127.0.0.1:7") as (process, port):
        assert httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30, **PLAIN_HTTP).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = process.stderr.read()
    assert [line for line in log.splitlines() if "WARNING" in line and "is ejected" not in line] == []
    assert "the proxy stops: its requests end with an error (503)" in log
    assert log.endswith("the proxy has stopped\n")


@pytest.mark.parametrize("request_id", ["cmpl-00000000-0000-4000-8000-000000000000-0", "chatcmpl-", "cmpl-x-0", ""])
def test_ticket_for_no_request(idle_cluster: Cluster, request_id: str) -> None:
    answer = idle_cluster.client.post(METASERVER_PATH, json=make_ticket(request_id, "t"))
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_ticket_must_fit_its_request(cluster: Cluster) -> None:
    cluster.decode.needs_prefill = False
    with cluster.streaming() as (request_id, _):
        for wrong in (f"cmpl-{request_id}-1", f"chatcmpl-{request_id}"):
            assert cluster.client.post(METASERVER_PATH, json=make_ticket(wrong, "t")).status_code == 404
    assert cluster.prefill.received == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"\xff", b'{"\xff": 1}', b"[" * 100_000),
        *(b'{"request_id": 7}', b'{"request_id": "cmpl-x-0"}', b'{"remote_engine_id": "d"}'),
        b'{"request_id": "a", "remote_engine_id": "b", "x": ' + b"[" * 100_000,
    ],
)
def test_a_malformed_ticket_is_refused(idle_cluster: Cluster, body: bytes) -> None:
    answer = idle_cluster.client.post(METASERVER_PATH, content=body)
    assert answer.status_code == 400
    assert "not a ticket" in answer.json()["error"]


def test_tickets_and_questions_need_the_token(token_file: str) -> None:
    ticket = make_ticket("cmpl-nobody-waits", "0" * 32)
    posts = {METASERVER_PATH: ticket, METASERVER_PATH + WAITING_SUFFIX: {"ticket_ids": ["t"]}}
    with running_cluster(metaserver_token_file=token_file) as cluster:
        for path, message in posts.items():
            for given in (None, "", "a-secret", "Bearer a-secretx", "Basic a-secret", "Bearer \xfc"):
                headers = {} if given is None else {"Authorization": given.encode("latin-1")}
                refused = cluster.client.post(path, json=message, headers=headers)
                assert (refused.status_code, "token" in refused.json()["error"]) == (401, True)
                assert "a-secret" not in refused.text
        headers = {"Authorization": "Bearer a-secret"}
        known = [cluster.client.post(path, json=message, headers=headers) for path, message in posts.items()]
        assert known[0].status_code == 404
        assert known[1].json() == {"waiting": []}


@pytest.mark.parametrize("name", ["request_id", "remote_engine_id"])
@pytest.mark.parametrize("value", ["\x1b[31m", "a\nb", "x" * 1000])
def test_a_ticket_with_unprintable_names_is_refused(idle_cluster: Cluster, name: str, value: str) -> None:
    ticket = make_ticket("cmpl-nobody-waits", "0" * 32) | {name: value}
    refused = idle_cluster.client.post(METASERVER_PATH, json=ticket)
    assert (refused.status_code, "unprintable" in refused.json()["error"]) == (400, True)
