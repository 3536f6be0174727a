# SPDX-License-Identifier: Apache-2.0
"""The metaserver client reports failed transfers beside its posts."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest
from metaserver_posts import *  # noqa: F403
from metaserver_posts import QUICK, Metaserver, eventually, outcome_of, raw_server

from harness.tcp_server import read_to_the_end, serving
from vllm_ascend_pd.core.metaserver import TransferFailure
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient


def test_failures_are_reported_beside_the_post(metaserver: Metaserver, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("told\n")
    token.chmod(0o600)
    client = MetaserverClient(msgspec.structs.replace(QUICK, token_file=str(token)), own_host="127.0.0.1")
    client.post("key", metaserver.url, {"id": "told", "do": "hang"})
    client.report_failure(metaserver.url, TransferFailure("r", "t", 1, "went silent", final=False))
    eventually(lambda: metaserver.failures)
    assert metaserver.failures == [
        {"request_id": "r", "ticket_id": "t", "attempt": 1, "reason": "went silent", "final": False}
    ]
    assert "Bearer told" in metaserver.tokens
    assert client.poll() == []
    client.close()


def test_failures_are_reported_while_posts_have_all_connections(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, max_connections=1), own_host="127.0.0.1")
    for key in ("first", "second"):
        client.post(key, metaserver.url, {"id": key, "do": "hang"})
    client.report_failure(metaserver.url, TransferFailure("r", "t", 1, "went silent", final=False))
    eventually(lambda: metaserver.failures)
    assert client.poll() == []
    client.close()


def test_failures_that_cannot_be_reported(metaserver: Metaserver, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged, and posts work as before."""
    failure = TransferFailure("r", "t", 0, "why", final=True)
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with caplog.at_level("WARNING"), raw_server(b"\x00 garbage\r\n\r\n") as (url, seen):
        client.report_failure(f"http://127.0.0.1:{port}{METASERVER_PATH}", failure)
        client.report_failure(url, failure)
        client.report_failure("http://192.0.2.1/v1/metaserver", failure)  # not allowed: not even tried
        eventually(lambda: len(caplog.records) == 2)
        assert len(seen) == 2
    for record in caplog.records:
        assert record.message.startswith("request r: its failed transfer ")
        assert "cannot be reported to metaserver http://127.0.0.1:" in record.message
    assert outcome_of(client, metaserver.url, "ok").ok
    client.close()
    client.report_failure(metaserver.url, failure)


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
        failure = TransferFailure("r", "t", 0, "why", final=True)
        client.report_failure(f"http://127.0.0.1:{port}{METASERVER_PATH}", failure)
        eventually(lambda: len(heard) == 2)
        assert b"why" in heard[1]


def test_little_is_read_of_an_endless_answer_to_a_failure_report(client: MetaserverClient) -> None:
    most = 64
    taken: list[bool] = []

    def serve(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (most << 20))
        try:
            for _ in range(most):
                peer.sendall(b"x" * (1 << 20))
        except OSError:
            taken.append(False)
        else:
            taken.append(True)

    with serving(serve) as port:
        client.report_failure(
            f"http://127.0.0.1:{port}{METASERVER_PATH}", TransferFailure("r", "t", 0, "why", final=True)
        )
        eventually(lambda: taken)
    assert taken == [False]


def test_failure_reports_at_a_time_are_bounded() -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, max_pending=2), own_host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}{METASERVER_PATH}"
        for _ in range(5):
            client.report_failure(url, TransferFailure("r", "t", 0, "why", final=True))
        silent.settimeout(10)
        peers = [silent.accept()[0] for _ in range(2)]
        silent.settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent.accept()
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 5
        for peer in peers:
            peer.close()
