# SPDX-License-Identifier: Apache-2.0
"""What the metaserver client sends beside posts: failed transfers, and questions that move deadlines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from metaserver_posts import *  # noqa: F403
from metaserver_posts import Metaserver, client_with, eventually, outcome_of, outcomes, raw_server, url_of
from starlette.responses import JSONResponse, Response

from harness.tcp_server import read_to_the_end, serving
from vllm_ascend_pd.core.protocol import TransferFailure
from vllm_ascend_pd.decode import metaserver_client as metaserver_module
from vllm_ascend_pd.decode import ticket_client
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.ticket_client import PostOutcome

FAILURE = TransferFailure("r", "t", "went silent")
DEADLINE_S = 1.2


def test_failures_are_reported_while_posts_have_all_connections(metaserver: Metaserver, token_file: str) -> None:
    with client_with(metaserver_max_connections=1, metaserver_token_file=token_file) as client:
        for key in ("first", "second"):
            client.post(key, metaserver.url, {"id": key, "do": "hang"})
        client.report_failure(metaserver.url, FAILURE)
        eventually(lambda: metaserver.failures)
        assert metaserver.failures == [{"request_id": "r", "ticket_id": "t", "reason": "went silent"}]
        assert metaserver.headers[-1]["authorization"] == "Bearer a-secret"
        assert client.poll() == []


def test_failures_that_cannot_be_reported(
    client: MetaserverClient, metaserver: Metaserver, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is logged, and posts work as before."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with caplog.at_level("WARNING"), raw_server(b"\x00 garbage\r\n\r\n") as (url, seen):
        client.report_failure(url_of(port), FAILURE)
        client.report_failure(url, FAILURE)
        eventually(lambda: len(caplog.records) == 2)
        assert len(seen) == 2
    for record in caplog.records:
        assert record.message.startswith("request r: its failed transfer ")
        assert "cannot be reported to metaserver http://127.0.0.1:" in record.message
    assert outcome_of(client, metaserver.url, "ok").ok


def test_a_failure_is_reported_again_if_the_connection_was_just_being_closed(client: MetaserverClient) -> None:
    heard: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        said = b""
        while not said.endswith(b"}"):
            said += peer.recv(65536)
        heard.append(said)
        if len(heard) == 1:
            return
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        read_to_the_end(peer)

    with serving(serve) as port:
        client.report_failure(url_of(port), FAILURE)
        eventually(lambda: len(heard) == 2)
        assert b"went silent" in heard[1]


@pytest.mark.parametrize(("most", "pending"), [(2, 2), (8, 4096)], ids=["at-all", "at-a-time"])
def test_failure_reports_are_bounded(most: int, pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_client, "MAX_PENDING", pending)
    with client_with() as client, socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        for _ in range(most + 3):
            client.report_failure(url_of(silent.getsockname()[1]), FAILURE)
        silent.settimeout(10)
        peers = [silent.accept()[0] for _ in range(most)]
        silent.settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent.accept()
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 5
        for peer in peers:
            peer.close()


Says = Callable[[list[str]], Response]


def all_wait(ticket_ids: list[str]) -> Response:
    return JSONResponse({"waiting": ticket_ids})


@contextmanager
def posted(metaserver: Metaserver, says: Says, *keys: str, **settings: Any) -> Iterator[MetaserverClient]:
    metaserver.says = says
    with client_with(**{"transfer_timeout_s": DEADLINE_S, **settings}) as client:
        for key in keys:
            client.post(key, metaserver.url, {"id": key, "do": "hold"})
        yield client


def test_a_ticket_that_waits_gets_its_time_again(metaserver: Metaserver) -> None:
    with posted(metaserver, all_wait, "t") as client:
        time.sleep(3 * DEADLINE_S)
        assert client.poll() == []
        metaserver.released = True
        assert outcomes(client, 1) == [PostOutcome("t", ok=True)]
        assert metaserver.questions.count(["t"]) == len(metaserver.questions) > 3


def test_a_ticket_that_waits_ends_at_the_longest_time(metaserver: Metaserver) -> None:
    with posted(metaserver, all_wait, "t", queue_timeout_s=2.0 - DEADLINE_S) as client:
        [outcome] = outcomes(client, 1)
        assert "did not answer within 2 s, though it said that the ticket waits for prefill" in outcome.reason


@pytest.mark.parametrize(
    "says",
    [
        lambda _: Response(status_code=404),
        lambda _: Response(status_code=500),
        lambda _: Response(b"\x00\xff"),
        lambda _: JSONResponse({"waiting": [1, 2]}),
        lambda _: JSONResponse({"waiting": []}),
        lambda _: JSONResponse({"waiting": ["another"]}),
        lambda _: Response(b"x" * (1 << 20)),
    ],
    ids=["of-other-make", "broken", "garbage", "other-types", "unknown", "others-only", "endless"],
)
def test_an_answer_that_does_not_name_a_ticket_leaves_its_deadline(metaserver: Metaserver, says: Says) -> None:
    began = time.monotonic()
    with posted(metaserver, says, "t") as client:
        [outcome] = outcomes(client, 1)
        assert f"did not answer within {DEADLINE_S:g} s" in outcome.reason
        assert DEADLINE_S <= time.monotonic() - began < 4 * DEADLINE_S
        assert metaserver.questions


def test_a_question_that_is_lost_is_asked_again(metaserver: Metaserver) -> None:
    def says(ticket_ids: list[str]) -> Response:
        return Response(status_code=503) if len(metaserver.questions) == 1 else all_wait(ticket_ids)

    with posted(metaserver, says, "t", transfer_timeout_s=2.0) as client:
        eventually(lambda: len(metaserver.questions) > 5)
        assert client.poll() == []


def test_many_tickets_are_asked_about_in_few_messages(metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaserver_module, "MAX_ASKED", 8)
    monkeypatch.setattr(metaserver_module, "_ASK_EVERY_S", 2.0)
    keys = [f"{number:032x}" for number in range(16)]
    with posted(metaserver, all_wait, *keys, transfer_timeout_s=60.0, metaserver_max_connections=12) as client:
        eventually(lambda: len(metaserver.questions) >= 2)
        # The last four wait for a connection of decode's own: the metaserver does not know them.
        assert metaserver.questions[:2] == [keys[:8], keys[8:12]]
        assert client.poll() == []


def test_posts_without_a_connection_get_their_time_again_if_the_metaserver_answers(metaserver: Metaserver) -> None:
    with posted(metaserver, all_wait, "first", "second", metaserver_max_connections=1) as client:
        time.sleep(3 * DEADLINE_S)
        assert client.poll() == []
        assert set(map(tuple, metaserver.questions)) == {("first",)}
        metaserver.released = True
        assert outcomes(client, 2) == [PostOutcome("first", ok=True), PostOutcome("second", ok=True)]


def test_a_ticket_answered_soon_is_not_asked_about(metaserver: Metaserver) -> None:
    with posted(metaserver, all_wait, "t", transfer_timeout_s=4.0) as client:
        time.sleep(0.3)
        metaserver.released = True
        assert outcomes(client, 1) == [PostOutcome("t", ok=True)]
        time.sleep(1.5)
        assert metaserver.questions == []


def test_a_deadline_that_is_prolonged_too_late_is_no_success(metaserver: Metaserver) -> None:
    """The deadline passes at the moment of the answer."""
    with posted(metaserver, lambda _: Response(status_code=404), "t", transfer_timeout_s=2.0) as client:
        eventually(lambda: client._posts)
        [post], loop = client._posts.values(), client._thread.loop

        def too_late() -> None:
            time.sleep(max(0.0, post.scope.deadline - loop.time()) + 0.01)
            loop.call_later(0, post.extend, loop.time() + 60)  # behind the deadline's own timer

        loop.call_soon_threadsafe(too_late)
        [outcome] = outcomes(client, 1)
        assert "did not answer within 2 s" in outcome.reason


def test_an_answer_counts_from_when_it_was_asked_for(metaserver: Metaserver) -> None:
    """A late answer does not extend the deadline further."""
    asked: list[float] = []

    def says(ticket_ids: list[str]) -> Response:
        asked.append(time.monotonic())
        if len(asked) > 1:
            return Response(status_code=404)
        time.sleep(0.7)  # the server's only thread: nothing else is answered meanwhile
        return all_wait(ticket_ids)

    with posted(metaserver, says, "t", transfer_timeout_s=4.0) as client:
        [outcome] = outcomes(client, 1)
        assert not outcome.ok
        assert 3.9 < time.monotonic() - asked[0] < 4.5


def test_a_metaserver_that_hangs_holds_up_no_questions_to_others(metaserver: Metaserver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, posted(metaserver, all_wait, "t") as client:
        client.post("other", url_of(silent.getsockname()[1]), {})
        [outcome] = outcomes(client, 1)
        assert outcome.key == "other"
        time.sleep(3 * DEADLINE_S)
        assert client.poll() == []
