# SPDX-License-Identifier: Apache-2.0
"""Decode posts further tickets for a request whose client has tokens: each takes the place of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from engine_standin import make_failure, make_ticket
from proxy_cluster import COMPLETION, Cluster, eventually, running_cluster

from vllm_ascend_pd.core.protocol import METASERVER_PATH

IDS = [5, 6, 7, 8]
REASON = "who_computes is never, and it wants log probabilities"


@pytest.fixture
def streaming() -> Iterator[Cluster]:
    """A stream whose client has one token, and whose ticket was answered."""
    with running_cluster(attempts=1) as cluster, cluster.streaming():
        yield cluster


def post(cluster: Cluster, ticket_id: str, replaces: str) -> httpx.Response:
    """Posts a ticket for the stream's request."""
    request_id = cluster.decode.tickets[0]["request_id"]
    ticket = {**make_ticket(request_id, ticket_id), "replaces": replaces, "token_ids": IDS}
    return cluster.client.post(METASERVER_PATH, json=ticket)


def test_each_ticket_takes_the_place_of_the_one_before(streaming: Cluster) -> None:
    assert post(streaming, "second", streaming.decode.tickets[0]["ticket_id"]).status_code == 200
    assert post(streaming, "third", "second").status_code == 200
    asked = streaming.prefill.received[1:]
    assert [(each.path, each.body["prompt"]) for each in asked] == 2 * [("/v1/completions", IDS)]
    assert not streaming.decode.cancelled.is_set(), "the client's stream goes on"


@pytest.mark.parametrize("replaces", ["", "made-up"])
def test_a_ticket_that_takes_no_place_is_one_too_many(streaming: Cluster, replaces: str) -> None:
    refused = post(streaming, "second", replaces)
    assert (refused.status_code, "has all its tickets" in refused.json()["error"]) == (409, True)


def test_a_place_is_taken_once(streaming: Cluster) -> None:
    known = streaming.decode.tickets[0]["ticket_id"]
    assert post(streaming, "second", known).status_code == 200
    assert post(streaming, "third", known).status_code == 409


def test_a_ticket_that_is_posted_again_keeps_its_place(streaming: Cluster) -> None:
    """Its answer was lost, for example."""
    known = streaming.decode.tickets[0]["ticket_id"]
    assert [post(streaming, "second", known).status_code for _ in range(2)] == [200, 200]
    assert post(streaming, "third", "second").status_code == 200
    assert not streaming.decode.cancelled.is_set()


@pytest.mark.parametrize("late", ["first", "second"])
def test_a_ticket_that_comes_after_the_one_in_its_place_is_refused(streaming: Cluster, late: str) -> None:
    known = streaming.decode.tickets[0]["ticket_id"]
    assert post(streaming, "second", known).status_code == 200
    assert post(streaming, "third", "second").status_code == 200
    asked = len(streaming.prefill.received)
    refused = post(streaming, known, "") if late == "first" else post(streaming, "second", known)
    assert refused.status_code == 409
    assert len(streaming.prefill.received) == asked
    assert not streaming.decode.cancelled.is_set()


def test_failures_count_until_kv_has_come(streaming: Cluster) -> None:
    """Otherwise decode and prefill could fail together without end."""
    streaming.prefill.transfer_error = "no route"
    failed = post(streaming, "second", streaming.decode.tickets[0]["ticket_id"])
    assert (failed.status_code, failed.json()) == (502, {"error": "no route", "may_follow": False})
    streaming.prefill.transfer_error = None
    asked = len(streaming.prefill.received)
    assert post(streaming, "third", "second").status_code == 502
    assert len(streaming.prefill.received) == asked
    assert not streaming.decode.cancelled.is_set()


def test_a_further_ticket_gets_another_prefill_while_attempts_are_left() -> None:
    with running_cluster(attempts=2) as cluster, cluster.streaming():
        cluster.prefill.transfer_error = "no route"
        failed = post(cluster, "second", cluster.decode.tickets[0]["ticket_id"])
        assert (failed.status_code, failed.json()) == (502, {"error": "no route", "may_follow": True})
        cluster.prefill.transfer_error = None
        assert post(cluster, "third", "second").status_code == 200
        assert not cluster.decode.cancelled.is_set()


def refuse(cluster: Cluster, is_unfit: bool) -> None:
    """Decode refuses the request that it has: it posts no ticket."""
    request_id = f"cmpl-{cluster.decode.received[-1].headers['x-request-id']}-0"
    ticket = {"request_id": request_id, "ticket_id": ""}
    failure = {**make_failure(ticket, REASON), "is_unfit": is_unfit}
    assert cluster.client.post(METASERVER_PATH + "/failure", json=failure).status_code == 200


@pytest.mark.parametrize(("is_unfit", "status"), [(True, 400), (False, 502)])
def test_a_request_that_decode_refuses(is_unfit: bool, status: int) -> None:
    with running_cluster(attempts=1) as cluster, ThreadPoolExecutor(1) as client:
        cluster.decode.hangs = True
        answer = client.submit(cluster.client.post, "/v1/completions", json=COMPLETION)
        eventually(lambda: cluster.decode.received)
        refuse(cluster, is_unfit)
        assert (answer.result().status_code, REASON in answer.result().text) == (status, True)
        assert cluster.prefill.received == []
