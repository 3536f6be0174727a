# SPDX-License-Identifier: Apache-2.0
"""The metaserver client against real HTTP servers on the loopback interface: what it sends, and how posts end."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from metaserver_posts import *  # noqa: F403
from metaserver_posts import HELD_BACK, QUICK, Metaserver, Retries, eventually, outcome_of, outcomes, raw_server

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode import metaserver_http
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.pending_posts import PostOutcome


def test_success(client: MetaserverClient, metaserver: Metaserver) -> None:
    assert outcome_of(client, metaserver.url, "ok") == PostOutcome("ok", ok=True)


def test_answers_held_back_for_many_requests_at_once(client: MetaserverClient, metaserver: Metaserver) -> None:
    started = time.monotonic()
    for i in range(HELD_BACK):
        client.post(str(i), metaserver.url, {"id": "held", "do": "hold back"})
    assert time.monotonic() - started < 0.5
    assert {outcome.key for outcome in outcomes(client, HELD_BACK) if outcome.ok} == set(map(str, range(HELD_BACK)))


@pytest.mark.parametrize(
    ("do", "attempts", "ok", "text"),
    [
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
    assert metaserver.attempts[do] == retries.count + 1 == attempts


@pytest.mark.parametrize(
    ("answer", "connections", "text"),
    [
        (b"\x00\xffSSH-2.0 hello\r\n\r\n", 1, "does not speak HTTP"),
        (b"", 6, "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", 1, "closed the connection in the middle of its answer"),
    ],
)
def test_broken_servers(client: MetaserverClient, answer: bytes, connections: int, text: str) -> None:
    with raw_server(answer) as (url, seen):
        outcome = outcome_of(client, url, "ok")
        assert not outcome.ok
        assert text in outcome.reason
        assert len(seen) == connections


def test_a_reset_is_tried_again(client: MetaserverClient) -> None:
    with raw_server(b"", reset=True) as (url, seen):
        outcome = outcome_of(client, url, "ok")
        assert "closed the connection without an answer; did it restart? (6 attempts)" in outcome.reason
        assert len(seen) == 6


def test_endless_body_is_cut(client: MetaserverClient) -> None:
    endless = b"HTTP/1.1 400 Bad\r\nContent-Length: 100000000\r\n\r\n" + b"y" * 200_000
    with raw_server(endless) as (url, _):
        assert "answered 400: yyy" in outcome_of(client, url, "ok").reason


def test_a_redirect_and_proxies_of_the_environment_lead_nowhere(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (elsewhere, seen):
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere.removesuffix(METASERVER_PATH))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        client = MetaserverClient(QUICK, own_host="127.0.0.1")
        try:
            assert outcome_of(client, metaserver.url, "ok").ok
            moved = f"HTTP/1.1 308 Moved\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n"
            with raw_server(moved.encode()) as (url, _):
                assert "redirects are not followed" in outcome_of(client, url, "ok").reason
        finally:
            client.close()
        assert seen == []


def test_unreachable_port(client: MetaserverClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = outcome_of(client, f"http://127.0.0.1:{port}{METASERVER_PATH}", "ok")
    assert "unreachable" in outcome.reason
    assert "(6 attempts)" in outcome.reason


def test_hang_past_the_deadline(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, deadline_s=0.3), own_host="127.0.0.1")
    started = time.monotonic()
    assert "did not answer within 0.3 s" in outcome_of(client, metaserver.url, "hang").reason
    assert time.monotonic() - started < 2
    client.close()


def test_read_timeout_below_the_deadline(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, read_timeout_s=0.2), own_host="127.0.0.1")
    assert "did not answer within 0.2 s" in outcome_of(client, metaserver.url, "hang").reason
    client.close()


def test_a_ticket_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket larger than the kernel's buffers, for a server that accepts and reads nothing."""
    monkeypatch.setattr(metaserver_http, "_WRITE_TIMEOUT_S", 0.3)
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}{METASERVER_PATH}"
        client.post("large", url, {"id": "x" * (32 << 20)})
        [outcome] = outcomes(client, 1, timeout_s=5)
        assert "did not read the ticket within 0.3 s" in outcome.reason
        port = server.getsockname()[1]
        ours = psutil.Process().net_connections
        eventually(lambda: not [one for one in ours("tcp") if one.raddr and one.raddr.port == port])
    client.close()


def test_a_connection_that_is_not_accepted_in_time() -> None:
    """The server's backlog is full, so the kernel drops new connections."""
    settings = msgspec.structs.replace(QUICK, connect_timeout_s=0.3, retries=0)
    client = MetaserverClient(settings, own_host="127.0.0.1")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        started = time.monotonic()
        outcome = outcome_of(client, f"http://127.0.0.1:{server.getsockname()[1]}{METASERVER_PATH}", "ok")
        assert "is unreachable" in outcome.reason
        assert time.monotonic() - started < 2
    client.close()


def test_waiting_for_a_connection_counts_towards_the_deadline(metaserver: Metaserver) -> None:
    settings = msgspec.structs.replace(QUICK, deadline_s=0.5, max_connections=1)
    client = MetaserverClient(settings, own_host="127.0.0.1")
    started = time.monotonic()
    for key in "abc":
        client.post(key, metaserver.url, {"id": key, "do": "hang"})
    assert not any(outcome.ok for outcome in outcomes(client, 3))
    assert time.monotonic() - started < 1.5
    client.close()


def test_too_many_pending(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, max_pending=2), own_host="127.0.0.1")
    for key in "abc":
        client.post(key, metaserver.url, {"id": key, "do": "hang"})
    [overflow] = client.poll()
    assert overflow.key == "c"
    assert "2 posts wait already" in overflow.reason
    client.cancel("a")
    client.post("d", metaserver.url, {"id": "d", "do": "ok"})
    assert outcomes(client, 1) == [PostOutcome("d", ok=True)]
    client.close()


def test_cancelled_post_has_no_outcome_and_frees_its_key(client: MetaserverClient, metaserver: Metaserver) -> None:
    client.post("key", metaserver.url, {"id": "cancelled", "do": "hang"})
    with pytest.raises(ValueError, match="under way"):
        client.post("key", metaserver.url, {})
    client.cancel("key")
    client.cancel("never posted")
    client.post("key", metaserver.url, {"id": "again", "do": "ok"})
    assert outcomes(client, 1) == [PostOutcome("key", ok=True)]
    time.sleep(0.1)
    assert client.poll() == []


def test_a_ticket_has_a_header_if_decode_recomputes(metaserver: Metaserver) -> None:
    for recomputes in (False, True):
        client = MetaserverClient(msgspec.structs.replace(QUICK, recomputes=recomputes), own_host="127.0.0.1")
        assert outcome_of(client, metaserver.url, "ok").ok
        assert metaserver.recomputes == ("1" if recomputes else None)
        client.close()


def test_an_answer_that_trickles_in_ends_at_the_deadline(metaserver: Metaserver) -> None:
    """Every byte comes within the read timeout."""
    client = MetaserverClient(msgspec.structs.replace(QUICK, deadline_s=1.0), own_host="127.0.0.1")
    assert "did not answer within 1 s" in outcome_of(client, metaserver.url, "trickle").reason
    client.close()


def test_token_is_sent(metaserver: Metaserver, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    settings = msgspec.structs.replace(QUICK, token_file=str(token))
    client = MetaserverClient(settings, own_host="127.0.0.1")
    assert outcome_of(client, metaserver.url, "ok").ok
    assert "Bearer secret" in metaserver.tokens
    client.close()
