# SPDX-License-Identifier: Apache-2.0
"""Prefill gets decode's token ids, on every route, so its own tokeniser and templates do not matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_standin import PrefillEngine
from proxy_cluster import CHAT, Cluster, beside, running_cluster
from test_proxy_routes import BODIES

IDS = [5, 99_999, 0, 7]
ONE_TOKEN = {"max_tokens": 1, "min_tokens": 1, "n": 1, "stream": False}

routes = pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        running.decode.token_ids = IDS
        yield running


def asked_of_prefill(cluster: Cluster) -> list[dict[str, Any]]:
    """The bodies that prefill got, all of them at `/v1/completions`."""
    assert {received.path for received in cluster.prefill.received} == {"/v1/completions"}
    return [received.body for received in cluster.prefill.received]


@routes
def test_prefill_gets_token_ids_and_nothing_else(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    response = cluster.client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    [at_decode] = cluster.decode.received
    prompts = len(body["messages"]) if path.endswith("/batch") else 1
    tickets = {ticket["ticket_id"]: ticket for ticket in cluster.decode.tickets}
    assert len(tickets) == len(asked_of_prefill(cluster)) == prompts
    for received in cluster.prefill.received:
        params = received.body.pop("kv_transfer_params")
        ticket = tickets.pop(params["ticket_id"])
        assert params == {name: value for name, value in ticket.items() if name != "token_ids"}
        model = {"model": body["model"]} if "model" in body else {}
        assert received.body == {**model, **ONE_TOKEN, "prompt": IDS}
        assert received.headers["x-request-id"] == at_decode.headers["x-request-id"]


def test_decode_that_gives_an_empty_list_is_served_by_the_clients_body(cluster: Cluster) -> None:
    """test_proxy_routes.py has decode that gives none."""
    cluster.decode.token_ids = []
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200
    [received] = cluster.prefill.received
    assert received.path == "/v1/chat/completions"


def test_a_ticket_of_too_many_token_ids_is_refused() -> None:
    with running_cluster(max_ticket_bytes=10_000) as cluster:
        cluster.decode.token_ids = [1] * 10_000
        assert cluster.complete().status_code == 500
        assert cluster.decode.metaserver_answers == [(413, {"error": "the ticket exceeds 10000 bytes"})]
        assert cluster.prefill.received == []


def test_a_second_prefill_engine_gets_the_same_token_ids() -> None:
    """The first one refuses the request, so it has not begun with the ticket."""
    first = PrefillEngine()
    first.refusal = (403, {"error": "no"})
    with beside(prefill=first) as cluster:
        cluster.decode.token_ids = IDS
        assert cluster.complete().status_code == 200
        [at_first], [at_second] = first.received, cluster.prefill.received
        assert at_first.body == at_second.body
        assert at_first.body["prompt"] == IDS
        assert len(cluster.decode.received) == 1


def test_what_prefill_says_of_another_prompt_reaches_the_client() -> None:
    """Only after other prefill engines were asked, one of which may have the right chat template, and then decode."""
    reason = "the prompt's tokens differ: decode and prefill rendered or tokenized it differently"
    first = PrefillEngine()
    first.transfer_error, first.refuses_tickets = reason, True
    with beside(prefill=first) as cluster:
        assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200
    with running_cluster() as cluster:
        cluster.prefill.transfer_error, cluster.prefill.refuses_tickets = reason, True
        answer = cluster.client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        assert reason in answer.json()["error"]["message"]
        cluster.decode.computes_itself = True
        assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200
