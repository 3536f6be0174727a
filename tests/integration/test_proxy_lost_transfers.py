# SPDX-License-Identifier: Apache-2.0
"""Engines that answer as if all were well, and whose KV does not arrive: which one is passed over, and that every
client gets an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers, make_ticket
from proxy_cluster import Cluster, beside, counted, eventually, running_cluster, withheld

from vllm_ascend_pd.core.protocol import METASERVER_PATH

CLIENTS, REQUESTS = 16, 200
PASSED_OVER_SECONDS = "vllm_ascend_pd.proxy.routing.engines._PASSED_OVER_SECONDS"


@pytest.fixture(autouse=True)
def passed_over_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(PASSED_OVER_SECONDS, 600.0)


@contextmanager
def engines(prefill: int, decode: int = 1) -> Iterator[tuple[Cluster, list[PrefillEngine], list[DecodeEngine]]]:
    """A cluster with so many engines. KV that a prefill engine loses is missed by every decode engine."""
    lost: set[str] = set()
    others = [PrefillEngine() for _ in range(prefill - 1)], [DecodeEngine() for _ in range(decode - 1)]
    with Servers() as servers:
        urls = [tuple(servers.start(lambda _, engine=engine: engine.app) for engine in each) for each in others]
        with running_cluster(other_prefill=urls[0], other_decode=urls[1]) as cluster:
            takers = [*others[1], cluster.decode]
            for taker in takers:
                taker.lost = lost
            yield cluster, [*others[0], cluster.prefill], takers


def statuses(cluster: Cluster, seed: int, number: int = REQUESTS, clients: int = CLIENTS) -> list[int]:
    """What so many requests of several clients, in an order by `seed`, are answered."""
    order = random.Random(seed)
    prompts = [f"{order.random()} is a prompt" * order.choice((1, 50)) for _ in range(number)]
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: cluster.complete(prompt=prompt).status_code, prompts))


@pytest.mark.parametrize(
    ("bad", "of", "seed"),
    [(1, 2, 1), (2, 3, 2), *(pytest.param(*each, 3, marks=pytest.mark.long) for each in ((1, 2), (2, 3), (1, 5)))],
)
def test_prefill_engines_that_deliver_nothing_cost_no_answer_and_are_passed_over(bad: int, of: int, seed: int) -> None:
    """They answer 200 at once, so they look as if they had nothing to do."""
    with engines(of) as (cluster, givers, [taker]):
        for giver in givers[:bad]:
            giver.loses = taker.lost
        givers[-1].takes = 0.01
        assert statuses(cluster, seed) == [200] * REQUESTS
        shunned = withheld(cluster)
        assert len(shunned["prefill"]) == bad
        assert all("transfers in a row failed there: went silent" in why for why in shunned["prefill"].values())
        assert cluster.prefill_url not in shunned["prefill"]
        assert shunned["decode"] == {}
        failures = counted(cluster)[1]
        lost = sum(len(giver.received) for giver in givers[:bad])
        assert failures["prefill"] == failures["decode"] == {"transfer failed": lost}
        assert 3 * bad <= lost <= bad * (3 + 2 * CLIENTS)
        problems = cluster.client.get("/health").json()["problems"]
        assert len(problems) == bad
        assert all("no KV arrives: the last" in each for each in problems)


def test_a_prompt_is_computed_by_another_engine_when_the_one_that_held_it_is_gone() -> None:
    """Decode offers the ticket itself, and learns so that nobody takes it. Prefill had succeeded for the proxy."""
    with engines(2) as (cluster, givers, [taker]):
        taker.intends = True
        givers[0].loses = taker.lost
        for number, giver in enumerate(givers):
            giver.held = giver.held | {"ticket_port": number + 1}
        assert cluster.complete().status_code == 200
        assert [len(giver.received) for giver in givers] == [1, 1]
        assert all(giver.received[0].body["kv_transfer_params"]["ticket_follows"] for giver in givers)
        held = [answer["kv_transfer_params"] for _, answer in taker.metaserver_answers]
        assert held == [giver.held for giver in givers]
        assert counted(cluster)[1]["prefill"] == {"transfer failed": 1}


def test_a_prompt_that_its_only_engine_does_not_hold_any_more_ends_with_the_reason() -> None:
    with running_cluster(attempts=1) as cluster:
        cluster.decode.intends = cluster.decode.loses_all = True
        answer = cluster.complete()
        assert answer.status_code == 503
        assert "went silent" in answer.text


def test_one_client_after_the_other_costs_four_prefills() -> None:
    """Of the first one it is not known yet whether others deliver."""
    with engines(2) as (cluster, givers, [taker]):
        givers[0].loses = taker.lost
        assert statuses(cluster, seed=4, number=30, clients=1) == [200] * 30
        assert len(givers[0].received) <= 4


def test_a_decode_engine_that_gets_no_kv_is_passed_over_and_not_the_prefill_engines() -> None:
    with engines(2, decode=2) as (cluster, _, takers):
        takers[0].loses_all = True
        assert statuses(cluster, seed=5, number=60, clients=4) == [200] * 60
        shunned = withheld(cluster)
        assert shunned["prefill"] == {}
        assert list(shunned["decode"]) != [cluster.decode_url]
        assert len(shunned["decode"]) == 1


# --- the only prefill engine does not fit -----------------------------------------------------------------


def test_decode_computes_what_the_only_prefill_engine_cannot_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/health` says so until a transfer succeeds."""
    monkeypatch.setattr(PASSED_OVER_SECONDS, 0.5)
    why = "block sizes 64 and 32 do not fit each other"
    with running_cluster() as cluster:
        cluster.prefill.transfer_error = why
        cluster.decode.computes_itself = True
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert len(cluster.prefill.received) < 6
        health = cluster.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        [problem] = health.json()["problems"]
        assert problem.startswith(f"prefill engine {cluster.prefill_url} to decode engine {cluster.decode_url}: ")
        assert problem.endswith(f"transfers failed: {why}")
        cluster.prefill.transfer_error = None

        def delivers() -> bool:
            return cluster.complete().status_code == 200 and not cluster.client.get("/health").json()["problems"]

        eventually(delivers)


@pytest.mark.parametrize("by_prefill", [True, False])
def test_a_prefill_engine_that_reports_its_failed_transfer_is_alive(by_prefill: bool) -> None:
    """Decode computes the prompt then. Otherwise the prompt may be what stops engines."""
    with running_cluster() as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.hangs = True
        cluster.decode.computes_itself = True
        answer = client.submit(cluster.complete)
        for number in (1, 2):
            eventually(lambda number=number: len(cluster.prefill.received) == number)
            ticket = cluster.prefill.received[-1].body["kv_transfer_params"]
            report = {"request_id": ticket["request_id"], "ticket_id": ticket["ticket_id"], "reason": "it broke"}
            body = {**report, **({"by_prefill": True} if by_prefill else {})}
            assert cluster.client.post(METASERVER_PATH + "/failure", json=body).status_code == 200
        assert answer.result().status_code == (200 if by_prefill else 502)
        kind = "transfer failed" if by_prefill else "transfer interrupted"
        assert counted(cluster)[1]["prefill"] == {kind: 2}


# --- tickets that say nothing about an engine -------------------------------------------------------------


def fails_transfers(engine: PrefillEngine) -> None:
    engine.transfer_error = "nobody describes itself at 10.0.0.9"


def refuses_tickets(engine: PrefillEngine) -> None:
    engine.transfer_error, engine.refuses_tickets = "the ticket is not signed", True


def chokes(engine: PrefillEngine) -> None:
    engine.refusal = (500, {"error": {"message": "remote_block_ids"}})


@pytest.mark.parametrize("fault", [fails_transfers, refuses_tickets, chokes])
@pytest.mark.parametrize("named", [True, False])
def test_made_up_tickets_of_a_client_change_nothing_for_others(
    fault: Callable[[PrefillEngine], None], named: bool
) -> None:
    """Without a token, a client posts tickets for its own request, whose id it has with the answer's first part."""
    assert not any(self_made(fault, named).values())


def test_with_a_token_all_tickets_are_decodes(token_file: str) -> None:
    assert self_made(chokes, named=False, token_file=token_file)["prefill"]


def self_made(fault: Callable[[PrefillEngine], None], named: bool, token_file: str | None = None) -> dict[str, Any]:
    """Which engines are passed over after tickets at which all prefill engines fail. One failure is enough."""
    givers = [PrefillEngine(), PrefillEngine()]
    token = {} if token_file is None else {"Authorization": "Bearer a-secret"}
    with beside(givers[0], prefill_engine=givers[1], eject_after=1, metaserver_token_file=token_file) as cluster:
        cluster.decode.needs_prefill = token_file is None  # the stand-in has no token
        for number in range(4):  # by turns
            assert cluster.complete(prompt=f"{number}").status_code == 200
        cluster.decode.needs_prefill = False
        with cluster.streaming() as (request_id, _):
            for giver in givers:
                fault(giver)
            replaces = ""
            for number in range(6):
                ticket = make_ticket(f"cmpl-{request_id}-0", f"made-up-{number}" if named else "")
                body = {**ticket, "replaces": replaces}
                assert cluster.client.post(METASERVER_PATH, json=body, headers=token).status_code == 502
                replaces = ticket["ticket_id"]
            return withheld(cluster)


def test_a_prompt_that_all_engines_refuse_counts_against_none() -> None:
    """Its image differs each time it is fetched, for example."""
    with engines(2) as (cluster, givers, _):
        assert statuses(cluster, seed=7, number=4, clients=1) == [200] * 4
        for giver in givers:
            refuses_tickets(giver)
        for _ in range(4):
            assert cluster.complete().status_code == 503
        assert withheld(cluster)["prefill"] == {}
        assert cluster.client.get("/health").json()["problems"] == []


def test_an_engine_that_refuses_the_tickets_that_another_takes_is_passed_over() -> None:
    """It has another secret, or another chat template."""
    with engines(2) as (cluster, givers, _):
        refuses_tickets(givers[0])
        assert statuses(cluster, seed=8, number=40, clients=4) == [200] * 40
        [why] = withheld(cluster)["prefill"].values()
        assert "refused what others took: ticket refused" in why
