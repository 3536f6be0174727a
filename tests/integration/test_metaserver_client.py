# SPDX-License-Identifier: Apache-2.0
"""The metaserver client's posts against real HTTP servers on the loopback interface: what it sends, how they end."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import random
import socket
import threading
import time
from typing import Any

import pytest
from metaserver_posts import *  # noqa: F403
from metaserver_posts import (
    QUICK,
    Metaserver,
    Retries,
    client_with,
    eventually,
    no_connection_is_left,
    outcome_of,
    outcomes,
    raw_server,
    url_of,
)
from starlette.responses import JSONResponse

from harness.tcp_server import serving
from vllm_ascend_pd.core.config import ConnectorConfig, TlsConfig
from vllm_ascend_pd.core.protocol import METASERVER_PATH, RECOMPUTES_HEADER, TransferFailure
from vllm_ascend_pd.decode import metaserver_client as metaserver_module
from vllm_ascend_pd.decode import ticket_client
from vllm_ascend_pd.decode.metaserver_allowlist import Admitted, Allowlist
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient, MetaserverError
from vllm_ascend_pd.decode.ticket_client import PostOutcome


@pytest.mark.parametrize(
    ("do", "attempts", "ok", "text"),
    [
        ("ok", 1, True, ""),
        ("unknown", 1, False, "answered 404: unknown [31mid: it does not know this request"),
        ("500 once", 2, True, ""),
        ("prefill failed", 1, False, "reports that prefill failed: out of blocks"),
        ("bad gateway", 6, False, "answered 502: <html>bad gateway</html>; see the proxy's log (6 attempts)"),
        ("redirect", 1, False, "redirects are not followed"),
    ],
)
def test_answers(
    client: MetaserverClient, metaserver: Metaserver, retries: Retries, do: str, attempts: int, ok: bool, text: str
) -> None:
    outcome = outcome_of(client, metaserver.url, do)
    assert outcome.ok is ok
    assert text in outcome.reason
    assert bool(outcome.reason) is not ok
    assert outcome.may_follow is (do == "prefill failed")
    assert metaserver.attempts[do] == retries.count + 1 == attempts


def test_a_url_that_names_an_attempt(client: MetaserverClient, metaserver: Metaserver) -> None:
    """As PyMotor's does. A failure is reported beside it."""
    url = f"{metaserver.url}?attempt=3"
    assert outcome_of(client, url, "ok").ok
    client.report_failure(url, TransferFailure("r", "t", "why"))
    eventually(lambda: metaserver.failures)
    assert metaserver.queries == ["attempt=3", "attempt=3"]


@pytest.mark.parametrize(
    ("answer", "reset", "connections", "text"),
    [
        (b"\x00\xffSSH-2.0 hello\r\n\r\n", False, 1, "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2_000_000, False, 1, "does not speak HTTP"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000, False, 1, "does not speak HTTP"),
        (b"", False, 6, "closed the connection without an answer; did it restart? (6 attempts)"),
        (b"", True, 6, "closed the connection without an answer; did it restart? (6 attempts)"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
            False,
            1,
            "closed the connection in the middle of its answer",
        ),
    ],
    ids=["garbage", "endless-header", "a-million-bytes-of-1xx", "nothing", "reset", "half-an-answer"],
)
def test_broken_servers(client: MetaserverClient, answer: bytes, reset: bool, connections: int, text: str) -> None:
    with raw_server(answer, reset=reset) as (url, seen):
        outcome = outcome_of(client, url, "ok")
        assert not outcome.ok
        assert text in outcome.reason
        assert len(seen) == connections


def test_an_unreachable_port(client: MetaserverClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reason = outcome_of(client, url_of(port), "ok").reason
    assert reason.startswith(f"metaserver {url_of(port)} is unreachable: [Errno 111] ")
    assert reason.endswith("; is the proxy running, and reachable from here? (6 attempts)")


def test_pauses_between_attempts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaserver_module, "_FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(metaserver_module, "_LAST_PAUSE_S", 0.4)
    with raw_server(b"") as (url, seen), client_with(metaserver_retries=4) as client:
        outcome_of(client, url, "ok")
        pauses = [later - earlier for earlier, later in itertools.pairwise(seen)]
        assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.2, 0.2), strict=True)), pauses
        assert sum(pauses) < 5


@pytest.mark.parametrize("is_post", [True, False], ids=["post", "report"])
def test_little_is_read_of_an_endless_answer(client: MetaserverClient, is_post: bool) -> None:
    most = 64
    taken: list[bool] = []

    def serve(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % (most << 20))
        try:
            for _ in range(most):
                peer.sendall(b"y" * (1 << 20))
        except OSError:
            taken.append(False)
        else:
            taken.append(True)

    with serving(serve) as port:
        if is_post:
            assert "answered 400: yyy" in outcome_of(client, url_of(port), "ok").reason
        else:
            client.report_failure(url_of(port), TransferFailure("r", "t", "why"))
        eventually(lambda: taken)
    assert taken == [False]


def test_an_answer_is_not_decompressed(client: MetaserverClient) -> None:
    bomb = gzip.compress(b"z" * 10_000_000)
    head = f"HTTP/1.1 400 Bad\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
    with raw_server(head.encode() + bomb) as (url, _):
        assert "zz" not in outcome_of(client, url, "ok").reason


def test_a_redirect_and_proxies_of_the_environment_lead_nowhere(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (elsewhere, seen):
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere.removesuffix(METASERVER_PATH))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with client_with() as client:
            assert outcome_of(client, metaserver.url, "ok").ok
            moved = f"HTTP/1.1 308 Moved\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n"
            with raw_server(moved.encode()) as (url, _):
                assert "redirects are not followed" in outcome_of(client, url, "ok").reason
        assert seen == []


def test_what_a_ticket_is_sent_with(metaserver: Metaserver, token_file: str) -> None:
    """HTTP/1.1, a token from a file, whether decode recomputes, and no cookies of answers before."""
    for settings in ({}, {"recomputes": True, "metaserver_token_file": token_file}):
        with client_with(**settings) as client:
            for _ in range(2):
                assert outcome_of(client, metaserver.url, "ok").ok
            headers = metaserver.headers[-1]
            assert headers["content-type"] == "application/json"
            assert headers.get(RECOMPUTES_HEADER.lower()) == ("1" if settings else None)
            assert headers.get("authorization") == ("Bearer a-secret" if settings else None)
            assert "cookie" not in headers
            assert [each.cookies for _, each in client._connections._idle] == [{}], "none is kept"


@pytest.mark.parametrize(
    "config",
    [
        ConnectorConfig(peers=("http://user@proxy",)),
        ConnectorConfig(metaserver_token_file="/nonexistent/token"),
        ConnectorConfig(tls_config=TlsConfig(True, ssl_ca_certs="/nonexistent/ca.pem")),
        ConnectorConfig(tls_config=TlsConfig(True, ssl_keyfile_password_file="/nonexistent/password")),
    ],
)
def test_unusable_settings(config: ConnectorConfig) -> None:
    before = threading.active_count()
    with pytest.raises(MetaserverError):
        MetaserverClient(config, own_host="127.0.0.1")
    assert threading.active_count() == before


def test_the_allow_list_is_asked_before_each_attempt(client: MetaserverClient) -> None:
    """It forbids the URL after the first one."""
    asked: list[str] = []

    class Once(Allowlist):
        def _find(self, url: str, signature: str) -> Admitted | str:
            asked.append(url)
            return "no more" if len(asked) > 1 else super()._find(url, signature)

    client._allowlist = Once((), "127.0.0.1")
    with raw_server(b"") as (url, seen):
        assert outcome_of(client, url, "ok").reason == f"metaserver {url} is refused: no more"
        assert len(seen) == 1
        client.report_failure(url, TransferFailure("r", "t", "why"))
        eventually(lambda: len(asked) == 3)
        assert len(seen) == 1


# Time.


@pytest.mark.parametrize("do", ["hang", "trickle"])
def test_no_answer_by_the_deadline(metaserver: Metaserver, do: str) -> None:
    """Also if a byte comes now and then."""
    with client_with(transfer_timeout_s=0.5) as client:
        started = time.monotonic()
        assert "did not answer within 0.5 s" in outcome_of(client, metaserver.url, do).reason
        assert time.monotonic() - started < 3
        no_connection_is_left(metaserver.port)


def test_a_ticket_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket larger than the kernel's buffers, for a server that accepts and reads nothing."""
    monkeypatch.setattr(metaserver_module, "_WRITE_TIMEOUT_S", 0.3)
    with client_with() as client, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client.post("large", url_of(port), {"id": "x" * (32 << 20)})
        [outcome] = outcomes(client, 1, timeout_s=5)
        assert "did not read the ticket within 0.3 s" in outcome.reason
        no_connection_is_left(port)


def test_a_connection_that_is_not_accepted_in_time() -> None:
    """The server's backlog is full, so the kernel drops new connections."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(client_with(metaserver_connect_timeout_s=0.3, metaserver_retries=0))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        started = time.monotonic()
        outcome = outcome_of(client, url_of(server.getsockname()[1]), "ok")
        assert "is unreachable" in outcome.reason
        assert time.monotonic() - started < 2


# Bounds.


def test_answers_held_back_for_many_posts_at_once(client: MetaserverClient, metaserver: Metaserver) -> None:
    """The scheduler's thread does not wait for them."""
    count = 200
    started = time.monotonic()
    for i in range(count):
        client.post(str(i), metaserver.url, {"id": "held", "do": "hold"})
    assert time.monotonic() - started < 1
    eventually(lambda: metaserver.attempts["held"] == count)
    assert client.poll() == []
    metaserver.released = True
    assert {outcome.key for outcome in outcomes(client, count) if outcome.ok} == set(map(str, range(count)))


def test_connections_at_a_time_are_bounded() -> None:
    with client_with(metaserver_max_connections=2) as client, socket.create_server(("127.0.0.1", 0)) as silent:
        for key in "abcd":
            client.post(key, url_of(silent.getsockname()[1]), {})
        silent.settimeout(5)
        peers = [silent.accept()[0] for _ in range(2)]
        silent.settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent.accept()
        for peer in peers:
            peer.close()


def test_a_post_without_a_connection_ends_at_its_deadline(metaserver: Metaserver) -> None:
    """The only connection is busy: prefill has not come to another metaserver's ticket."""
    metaserver.says = lambda ticket_ids: JSONResponse({"waiting": ticket_ids})
    with client_with(transfer_timeout_s=2.0, metaserver_max_connections=1) as client:
        client.post("first", metaserver.url, {"id": "first", "do": "hold"})
        client.post("second", url_of(9), {})
        [outcome] = outcomes(client, 1)
        assert outcome.key == "second"
        text = "within 2 s: all 1 connections wait for answers"
        assert outcome.reason == f"not posted to metaserver {url_of(9)} {text}"


def test_too_many_pending(metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_client, "MAX_PENDING", 2)
    with client_with() as client:
        for key in "abc":
            client.post(key, metaserver.url, {"id": key, "do": "hang"})
        [overflow] = client.poll()
        assert overflow.key == "c"
        assert "2 tickets wait already" in overflow.reason
        client.cancel("a")
        client.post("d", metaserver.url, {"id": "d", "do": "ok"})
        assert outcomes(client, 1) == [PostOutcome("d", ok=True)]


# Connections.


def test_posts_reuse_connections_and_idle_ones_are_closed(client: MetaserverClient) -> None:
    """Without another post."""
    seen: list[str] = []

    def serve(peer: socket.socket) -> None:
        seen.append("opened")
        said = b""
        while more := peer.recv(65536):
            said += more
            if said.endswith(b"}"):
                said = b""
                seen.append("post")
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        seen.append("closed")

    with serving(serve) as port:
        for _ in range(3):
            assert outcome_of(client, url_of(port), "ok").ok
        eventually(lambda: "closed" in seen)
    assert seen == ["opened", "post", "post", "post", "closed"]


def test_cancelled_posts_leave_no_connection(client: MetaserverClient) -> None:
    """Posts are cancelled while a connection is opened, and before and after its first use."""
    chance = random.Random(1)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:  # it accepts nothing, the kernel does
        port = server.getsockname()[1]
        for i in range(600):
            client.post(str(i), url_of(port), {})
            time.sleep(chance.uniform(0, 0.004))
            client.cancel(str(i - chance.randrange(4)))
        for i in range(600):
            client.cancel(str(i))
        no_connection_is_left(port)
    assert client.poll() == []


def test_a_cancelled_post_has_no_outcome(client: MetaserverClient, metaserver: Metaserver) -> None:
    client.post("key", metaserver.url, {"id": "cancelled", "do": "hang"})
    with pytest.raises(ValueError, match="under way"):
        client.post("key", metaserver.url, {})
    client.cancel("key")
    client.cancel("never posted")
    client.post("other", metaserver.url, {"id": "other", "do": "ok"})
    assert outcomes(client, 1) == [PostOutcome("other", ok=True)]
    time.sleep(0.1)
    assert client.poll() == []


def test_a_post_cancelled_before_it_begins_is_not_sent(client: MetaserverClient, metaserver: Metaserver) -> None:
    client._thread.loop.call_soon_threadsafe(time.sleep, 0.3)
    client.post("key", metaserver.url, {"id": "cancelled", "do": "ok"})
    client.cancel("key")
    client.post("other", metaserver.url, {"id": "other", "do": "ok"})
    assert outcomes(client, 1) == [PostOutcome("other", ok=True)]
    time.sleep(0.1)
    assert metaserver.attempts == {"other": 1}


def test_a_name_without_an_answer_delays_no_post_to_another(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, silent = socket.getaddrinfo, threading.Event()

    def look_up(name: str, *args: Any, **options: Any) -> Any:
        if name in ("silent", b"silent"):
            silent.wait(15)
        return system(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    silent_url, url = (metaserver.url.replace("127.0.0.1", name) for name in ("silent", "localhost"))
    with client_with(peers=[silent_url, url]) as client:
        for number in range(40):
            client.post(str(number), silent_url, {"id": "x", "do": "ok"})
        begun = time.monotonic()
        client.post("other", url, {"id": "other", "do": "ok"})
        assert outcomes(client, 1) == [PostOutcome("other", ok=True)]
        client.close()
        assert time.monotonic() - begun < 5
    silent.set()


def test_close_is_quick_and_leaves_no_thread(metaserver: Metaserver) -> None:
    before = set(threading.enumerate())
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    for i in range(10):
        client.post(str(i), metaserver.url.replace("127.0.0.1", "localhost"), {"id": "x", "do": "hang"})
    time.sleep(0.2)
    started = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - started < 2
    assert set(threading.enumerate()) <= before
    no_connection_is_left(metaserver.port)
    client.post("late", metaserver.url, {})
    assert "shutting down" in client.poll()[0].reason
    client.report_failure(metaserver.url, TransferFailure("r", "t", "why"))


def test_closing_takes_no_longer_than_it_may(client: MetaserverClient) -> None:
    client._thread.loop.call_soon_threadsafe(time.sleep, 1.0)
    with pytest.raises(TimeoutError, match=r"did not stop within 0\.1 s"):
        client.close(timeout_s=0.1)
