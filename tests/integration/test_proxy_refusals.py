# SPDX-License-Identifier: Apache-2.0
"""Engines that refuse what others take, lack a model's name, or answer without a completion."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import Cluster, beside, eventually, running_cluster, withheld

from vllm_ascend_pd.proxy.rendezvous.tickets import REFUSED_BY_PREFILL

Engine = PrefillEngine | DecodeEngine
EITHER_ROLE = pytest.mark.parametrize("role", ["prefill", "decode"])
NO: dict[str, Any] = {"error": {"message": "no", "code": 400}}


def answers(status: int, engine: Engine) -> None:
    engine.refusal = (status, {"error": {"message": "not here"}})


def shows_a_page(status: int, engine: Engine) -> None:
    engine.page = status


def engine_of(role: str) -> Engine:
    return PrefillEngine() if role == "prefill" else DecodeEngine()


def good_one(role: str, cluster: Cluster) -> Engine:
    return cluster.prefill if role == "prefill" else cluster.decode


FAULTS = {
    **{f"HTTP {status}": partial(answers, status) for status in (400, 401, 403, 404, 408, 421, 429)},
    "a page": partial(shows_a_page, 200),
    "a page, 403": partial(shows_a_page, 403),
}
SHORT = {("HTTP 400", "prefill"), ("HTTP 429", "prefill"), ("HTTP 403", "decode"), ("a page", "decode")}
"""One for each of the rules that these fall under. tests/unit/test_answers.py has the rule of every status."""


@pytest.mark.parametrize(
    ("fault", "role"),
    [
        pytest.param(fault, role, id=f"{name}, {role}", marks=() if (name, role) in SHORT else pytest.mark.long)
        for name, fault in FAULTS.items()
        for role in ("prefill", "decode")
    ],
)
def test_an_engine_that_refuses_everything_costs_no_answer_and_is_passed_over(
    fault: Callable[[Engine], None], role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks as if it had nothing to do. It comes back when it serves again."""
    monkeypatch.setattr("vllm_ascend_pd.proxy.routing.engines._PASSED_OVER_SECONDS", 3.0)
    refuser = engine_of(role)
    fault(refuser)
    with caplog.at_level("INFO"), beside(**{role: refuser}) as cluster:
        cluster.prefill.takes = 0.02
        with ThreadPoolExecutor(16) as clients:

            def ask(number: int) -> int:
                return cluster.complete(prompt=f"{number} is a prompt").status_code

            assert list(clients.map(ask, range(160))).count(200) >= 159
        eventually(lambda: ask(0) and withheld(cluster)[role])  # again, if the time has passed on a busy machine
        [why] = withheld(cluster)[role].values()
        assert "requests in a row failed there: refused what others took: HTTP" in why
        assert len(refuser.received) < 60
        [of_role] = (each for each in cluster.client.get("/status.json").json()["roles"] if each["role"] == role)
        [refusing] = (engine for engine in of_role["engines"] if engine["state"] == "passed over")
        assert refusing["reason"] == why.removeprefix("passed over: ")
        metric = f'vllm:kv_pd_proxy_engine_ejected{{engine="{refusing["url"]}",role="{role}"}} 1.0'
        assert metric in cluster.client.get("/metrics").text
        said = [record.getMessage() for record in caplog.records]
        assert any(f"{role} engine {refusing['url']} is passed over for a while: " in message for message in said)
        # It is tried again, which costs no answer.
        asked = len(refuser.received)
        eventually(lambda: ask(1) == 200 and len(refuser.received) > asked)
        refuser.refusal = refuser.page = None
        eventually(lambda: ask(2) == 200 and not withheld(cluster)[role])


@EITHER_ROLE
def test_a_wrong_request_is_sent_to_two_engines_and_counts_against_none(role: str) -> None:
    engines = [engine_of(role) for _ in range(3)]
    with Servers() as others:
        urls = tuple(others.start(lambda _, engine=engine: engine.app) for engine in engines)
        with running_cluster(**{f"other_{role}": urls}) as cluster:
            everyone = [*engines, good_one(role, cluster)]
            said = f"{REFUSED_BY_PREFILL}: no" if role == "prefill" else "no"
            for engine in everyone:
                engine.refusal = (400, NO)
            for number in range(1, 6):
                response = cluster.complete()
                assert (response.status_code, response.json()) == (400, {"error": {**NO["error"], "message": said}})
                assert sum(len(engine.received) for engine in everyone) == 2 * number
            assert withheld(cluster)[role] == {}
            roles = cluster.client.get("/status.json").json()["roles"]
            assert {engine["state"] for each in roles for engine in each["engines"]} == {"healthy"}


# --- successes that are none ------------------------------------------------------------------------------


def test_an_aborted_prefill_is_tried_again_although_the_other_engine_refuses() -> None:
    refusing = PrefillEngine()
    refusing.refusal = (401, {"error": "Unauthorized"})
    with beside(prefill=refusing) as cluster:
        cluster.client.headers["X-Who-Computes"] = "prefill"
        cluster.prefill.aborts = 1
        assert cluster.complete().status_code == 200
        assert len(cluster.prefill.received) == 2


# --- names of models --------------------------------------------------------------------------------------


def test_a_prefill_engine_without_the_adapter_leaves_the_request_to_another() -> None:
    lacking = PrefillEngine()
    lacking.lacks = "an-adapter"
    with beside(prefill=lacking) as cluster:
        cluster.decode.adapter = "its-digest"
        for _ in range(6):
            assert cluster.complete(model="an-adapter").status_code == 200
        assert lacking.received
        assert all(sent.body["model"] == "an-adapter" for sent in cluster.prefill.received)
        assert withheld(cluster)["prefill"] == {}


@pytest.mark.parametrize("computes", [True, False])
def test_decode_computes_a_request_whose_adapter_no_prefill_engine_has(cluster: Cluster, computes: bool) -> None:
    cluster.prefill.lacks = "an-adapter"
    cluster.decode.adapter = "its-digest"
    cluster.decode.computes_itself = computes
    response = cluster.complete(model="an-adapter")
    assert response.status_code == (200 if computes else 503)
    if not computes:
        message = response.json()["error"]["message"]
        assert "prefill engine" in message
        assert "`an-adapter` does not exist" in message
        assert "127.0.0.1" not in message


@pytest.mark.parametrize("token_ids", [None, [1, 2, 3]])
def test_an_alias_that_prefill_does_not_know_is_not_sent_to_it(cluster: Cluster, token_ids: list[int] | None) -> None:
    """Decode's ticket says that the request has no adapter."""
    cluster.prefill.lacks = "an-alias"
    cluster.decode.adapter = ""
    cluster.decode.token_ids = token_ids
    assert cluster.complete(model="an-alias").status_code == 200
    [sent] = cluster.prefill.received
    assert "model" not in sent.body
    assert cluster.decode.received[0].body["model"] == "an-alias"
