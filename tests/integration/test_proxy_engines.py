# SPDX-License-Identifier: Apache-2.0
"""Engines that are added, drained and removed while the proxy runs: by its admin API and by DNS names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import Cluster, beside, eventually, running_cluster, withheld

ENGINES = "/admin/engines"
TOKEN = {"Authorization": "Bearer a-secret"}


@pytest.fixture
def cluster(token_file: str) -> Iterator[Cluster]:
    with running_cluster(admin_token_file=token_file) as running:
        yield running


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as running:
        yield running


def admin(cluster: Cluster, method: str, path: str = "", **options: Any) -> httpx.Response:
    return cluster.client.request(method, ENGINES + path, headers=TOKEN, **options)


def listed(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {engine["url"]: engine for engine in admin(cluster, "GET").json()["engines"]}


# --- the admin API ----------------------------------------------------------------------------------------


def test_without_a_token_file_there_is_no_admin_api() -> None:
    with running_cluster() as cluster:
        assert admin(cluster, "GET").status_code == 404
        assert admin(cluster, "POST", json={"role": "decode", "url": "http://127.0.0.1:1"}).status_code == 404


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer a-secre"}, {"Authorization": "a-secret"}])
def test_the_admin_api_needs_the_token(cluster: Cluster, given: dict[str, str]) -> None:
    engine = listed(cluster)[cluster.decode_url]["id"]
    for method, path in (
        ("GET", ""),
        ("POST", ""),
        ("POST", f"/{engine}:drain"),
        ("POST", f"/{engine}:undrain"),
        ("DELETE", f"/{engine}"),
        ("DELETE", "/no-such"),
    ):
        answer = cluster.client.request(method, ENGINES + path, headers=given)
        assert answer.status_code == 401
        assert "a-secret" not in answer.text
    assert listed(cluster)[cluster.decode_url]["state"] == "healthy"


def test_engine_is_added_and_removed_while_it_answers(cluster: Cluster, servers: Servers) -> None:
    new = DecodeEngine()
    url = servers.start(lambda _: new.app)
    added = admin(cluster, "POST", json={"role": "decode", "url": url + "/"})
    assert added.status_code == 201
    engine = added.json()
    assert (engine["role"], engine["url"], engine["state"], engine["listed_by"]) == (
        "decode",
        url,
        "new",
        ["the admin API"],
    )
    assert admin(cluster, "POST", json={"role": "decode", "url": url}).status_code == 409
    old = listed(cluster)[cluster.decode_url]["id"]
    assert admin(cluster, "DELETE", f"/{old}").status_code == 200
    new.waits = 1.0
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(cluster.complete)
        assert new.working.wait(10)
        assert admin(cluster, "DELETE", f"/{engine['id']}").json()["in_flight"] == 1
        refused = cluster.complete()
        assert (refused.status_code, "no decode engine" in refused.json()["error"]["message"]) == (503, True)
        assert answer.result().status_code == 200
    assert list(listed(cluster)) == [cluster.prefill_url]
    assert cluster.client.get("/health").status_code == 503


def test_a_new_engine_gets_requests_after_a_good_check(token_file: str, servers: Servers) -> None:
    new = PrefillEngine()
    new.healthy = False
    url = servers.start(lambda _: new.app)
    settings = {"check_interval": 0.05, "eject_after": 10_000}
    with running_cluster(admin_token_file=token_file, **settings) as cluster:
        assert admin(cluster, "POST", json={"role": "prefill", "url": url}).json()["state"] == "new"
        eventually(lambda: listed(cluster)[url]["reason"] == "HTTP 503")
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert not new.received
        assert withheld(cluster)["prefill"] == {url: "new: HTTP 503"}
        new.healthy = True
        eventually(lambda: listed(cluster)[url]["state"] == "healthy")
        for _ in range(2):
            assert cluster.complete().status_code == 200
        assert len(new.received) == 1


def test_a_drained_engine_finishes_its_requests(token_file: str) -> None:
    other = PrefillEngine()
    with beside(other, admin_token_file=token_file) as cluster, ThreadPoolExecutor(1) as client:
        url = next(each for each, engine in listed(cluster).items() if engine["role"] == "prefill")
        engine = listed(cluster)[url]["id"]
        cluster.decode.waits = 1.0
        answer = client.submit(cluster.complete)
        assert other.working.wait(10)
        assert admin(cluster, "POST", f"/{engine}:drain").json()["state"] == "draining"
        assert answer.result().status_code == 200
        cluster.decode.waits = 0.0
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert len(other.received) == 1
        assert withheld(cluster)["prefill"] == {url: "draining"}
        assert admin(cluster, "POST", f"/{engine}:undrain").json()["state"] == "healthy"
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert len(other.received) > 1


def test_wrong_engines_are_refused(cluster: Cluster) -> None:
    for body in (
        b"",
        b'{"role": "both", "url": "http://127.0.0.1:1"}',
        b'{"role": "decode", "url": "127.0.0.1:1"}',
        b'{"role": "decode", "url": "dns+http://localhost:1"}',
        b'{"role": "decode", "url": "http://127.0.0.1:1", "weight": 2}',
    ):
        assert admin(cluster, "POST", content=body).status_code == 400, body
    marked = admin(cluster, "POST", content=b"\xef\xbb\xbf{}").json()["error"]["message"]
    assert marked == "not a new engine: it begins with a byte order mark: send UTF-8 without one"
    assert admin(cluster, "POST", content=b" " * 70_000).status_code == 413
    assert len(listed(cluster)) == 2


# --- DNS names --------------------------------------------------------------------------------------------


def test_a_dns_name_stands_for_its_addresses(token_file: str) -> None:
    """localhost may have further addresses, at which no engine listens."""
    with Servers() as others:
        decode = DecodeEngine()
        port = others.start(lambda _: decode.app).rsplit(":", 1)[1]
        with running_cluster(other_decode=(f"dns+http://localhost:{port}",), admin_token_file=token_file) as cluster:
            assert listed(cluster)[f"http://127.0.0.1:{port}"]["listed_by"] == [f"dns+http://localhost:{port}"]
            for _ in range(4):
                assert cluster.complete().status_code == 200
            assert decode.received
