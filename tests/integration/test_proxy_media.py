# SPDX-License-Identifier: Apache-2.0
"""Images at URLs: the proxy fetches each once and gives its content to both engines."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import httpx
import pytest
from proxy_cluster import CHAT, Cluster, eventually, running_cluster

from harness.http_server import HOST, Handler, serving

CONTENT = b"\x89PNG" + bytes(range(256)) * 40


class Images(Handler):
    """Answers each path in a way of its own."""

    fetched: Counter[str]
    hang: Event

    def do_GET(self) -> None:
        type(self).fetched[self.path] += 1
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path == "/hangs":
            type(self).hang.wait(20)
            return
        status = int(self.path.removeprefix("/status/")) if self.path.startswith("/status/") else 200
        self.begin(status, "image/png")
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(CONTENT * (1000 if self.path == "/large" else 1))


@pytest.fixture
def images() -> Iterator[str]:
    Images.fetched, Images.hang = Counter(), Event()
    with serving(Images) as url:
        yield url
        Images.hang.set()


@pytest.fixture(scope="module")
def fetching() -> Iterator[Cluster]:
    """A cluster whose proxy fetches from this host."""
    with running_cluster(media_hosts=(HOST,), media_timeout=3.0, max_body_bytes=1 << 20) as cluster:
        yield cluster


def ask(cluster: Cluster, *urls: str) -> httpx.Response:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return cluster.client.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": parts}]})


def last_urls(cluster: Cluster) -> list[list[str]]:
    """Returns the URLs of images that decode and prefill got last."""
    bodies = [cluster.decode.received[-1].body, cluster.prefill.received[-1].body]
    return [[part["image_url"]["url"] for part in body["messages"][0]["content"]] for body in bodies]


def content_of(url: str) -> bytes:
    return base64.b64decode(url.partition(";base64,")[2])


def test_each_image_is_fetched_once_for_both_engines(fetching: Cluster, images: str) -> None:
    assert ask(fetching, f"{images}/a", f"{images}/b", f"{images}/a").status_code == 200
    assert Images.fetched == {"/a": 1, "/b": 1}
    of_decode, of_prefill = last_urls(fetching)
    assert of_decode == of_prefill
    assert [content_of(url) for url in of_decode] == [CONTENT] * 3


def test_images_of_other_hosts_are_left_to_the_engines(fetching: Cluster, images: str) -> None:
    others = ["https://images.example/a.png", images.replace(HOST, "localhost") + "/a", "file:///a.png", "http://[/"]
    assert ask(fetching, *others, f"{images}/b").status_code == 200
    for urls in last_urls(fetching):
        assert urls[:-1] == others
        assert content_of(urls[-1]) == CONTENT
    assert Images.fetched == {"/b": 1}


def test_nothing_is_fetched_unless_hosts_are_named(images: str) -> None:
    with running_cluster() as cluster:
        assert ask(cluster, f"{images}/a").status_code == 200
        assert last_urls(cluster) == [[f"{images}/a"]] * 2
    assert Images.fetched == {}


def test_all_hosts_and_redirects(fetching: Cluster, images: str) -> None:
    elsewhere = images.replace(HOST, "localhost")
    assert ask(fetching, f"{images}/to/{images}/a").status_code == 200
    assert [content_of(url) for [url] in last_urls(fetching)] == [CONTENT] * 2
    refused = ask(fetching, f"{images}/to/{elsewhere}/b")
    assert refused.status_code == 422
    assert "redirects to a host that is not one of --media-hosts" in refused.text
    assert Images.fetched["/b"] == 0
    with running_cluster(media_hosts=("*",)) as cluster:
        assert ask(cluster, f"{images}/to/{elsewhere}/b").status_code == 200
    assert Images.fetched["/b"] == 1


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/status/404", 422, "HTTP 404"),
        ("/status/503", 502, "HTTP 503"),
        ("/status/429", 502, "HTTP 429"),
        ("/hangs", 502, "more than 3 s"),
        ("/large", 413, "larger than --max-body-mib"),
    ],
)
def test_what_cannot_be_fetched_fails_the_request(
    fetching: Cluster, images: str, path: str, status: int, said: str
) -> None:
    asked = len(fetching.decode.received)
    refused = ask(fetching, f"{images}/a", f"{images}{path}")
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]
    assert len(fetching.decode.received) == asked


def test_a_host_that_does_not_answer(fetching: Cluster) -> None:
    refused = ask(fetching, f"http://{HOST}:1/a")
    assert refused.status_code == 502
    assert "ClientConnectorError" in refused.text


def test_too_many_images(fetching: Cluster, images: str) -> None:
    refused = ask(fetching, *(f"{images}/{i}" for i in range(257)))
    assert (refused.status_code, Images.fetched.total()) == (400, 0)


def test_a_client_that_leaves_ends_the_fetch(images: str) -> None:
    with running_cluster(media_hosts=(HOST,), media_timeout=60) as cluster:
        content = [{"type": "image_url", "image_url": f"{images}/hangs"}]
        body = {**CHAT, "messages": [{"role": "user", "content": content}]}
        connection = cluster.send_only("/v1/chat/completions", body)
        eventually(lambda: Images.fetched["/hangs"] == 1)
        connection.close()
        eventually(lambda: "requests_in_flight 0.0" in cluster.client.get("/metrics").text)
        assert cluster.decode.received == []
