# SPDX-License-Identifier: Apache-2.0
"""TLS and mutual TLS between decode and the metaserver, with real certificates; secrets stay out of logs."""

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest

from harness.certificates import Authority, Certificate
from harness.metaserver import metaserver as serving_metaserver
from harness.waiting import wait_for
from vllm_ascend_pd.core.config import ConnectorConfig, TlsConfig
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient, MetaserverError
from vllm_ascend_pd.decode.ticket_client import PostOutcome

CONFIG = ConnectorConfig(transfer_timeout_s=60, metaserver_retries=1)
PATIENCE_S = 60.0
PASSWORD = "password-of-the-key"
TOKEN = "a-token-that-nobody-sees"


@contextlib.contextmanager
def metaserver(certificate: Certificate, clients_of: Authority | None = None) -> Iterator[tuple[str, list[str | None]]]:
    """Its URL, and the authorization of each ticket. With `clients_of` it wants a certificate of that authority."""
    authorizations: list[str | None] = []

    def answer(post: BaseHTTPRequestHandler, content: bytes) -> None:
        authorizations.append(post.headers.get("authorization"))
        post.send_response(200)
        post.end_headers()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.cert, certificate.key)
    if clients_of is not None:
        tls.load_verify_locations(clients_of.cert)
        tls.verify_mode = ssl.CERT_REQUIRED
    with serving_metaserver(answer, tls) as url:
        yield url, authorizations


def outcome(
    url: str,
    trusted: Authority | None,
    own: Certificate | None = None,
    password: str | None = None,
    token_file: str | None = None,
) -> PostOutcome:
    """Of posting a ticket."""
    tls = TlsConfig(
        ssl_enable=True,
        ssl_certfile=None if own is None else str(own.cert),
        ssl_keyfile=None if own is None else str(own.key),
        ssl_keyfile_password=password,
        ssl_ca_certs=None if trusted is None else str(trusted.cert),
    )
    config = msgspec.structs.replace(CONFIG, tls_config=tls, metaserver_token_file=token_file)
    client = MetaserverClient(config, own_host="127.0.0.1")
    try:
        client.post("key", url, {"ticket": 1})
        [only] = wait_for(client.poll, bool, PATIENCE_S)
    finally:
        client.close()
    return only


def test_the_right_certificate(ours: Authority) -> None:
    for host in ("IP:127.0.0.1", "IP:127.0.0.1,DNS:localhost"):
        with metaserver(ours.issue("right", host)) as (url, _):
            assert outcome(url, ours) == PostOutcome("key", ok=True)
    with metaserver(ours.issue("named", "DNS:localhost")) as (url, _):
        assert outcome(url.replace("127.0.0.1", "localhost"), ours) == PostOutcome("key", ok=True)


def test_certificates_that_are_refused(ours: Authority, others: Authority) -> None:
    right = ours.issue("right", "IP:127.0.0.1")
    cases = {
        "certificate has expired": (ours.issue("expired", "IP:127.0.0.1", days=-1), ours),
        "IP address mismatch, certificate is not valid for '127.0.0.1'": (ours.issue("other", "IP:127.0.0.2"), ours),
        "unable to get local issuer certificate": (right, others),
    }
    for reason, (certificate, trusted) in cases.items():
        with metaserver(certificate) as (url, tickets):
            found = outcome(url, trusted, token_file=None)
            assert not found.ok
            assert found.reason == (
                f"metaserver {url}: its certificate is refused: {reason}; check it, and tls_config.ssl_ca_certs"
            )
            assert tickets == [], "nothing is sent to who is not the metaserver"
    with metaserver(right) as (url, tickets):
        found = outcome(url, None)
        assert "its certificate is refused: unable to get local issuer certificate" in found.reason, (
            "unknown to the system"
        )
        named = outcome(url.replace("127.0.0.1", "localhost"), ours)
        assert "Hostname mismatch, certificate is not valid for 'localhost'" in named.reason
        assert tickets == []


def test_tls_where_the_server_has_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hello() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                while peer.recv(1000):
                    pass

        thread = threading.Thread(target=hello)
        thread.start()
        found = outcome(f"https://127.0.0.1:{listener.getsockname()[1]}{METASERVER_PATH}", None)
        thread.join(PATIENCE_S)
    assert "TLS failed" in found.reason
    assert "check scheme and port" in found.reason


def test_mutual_tls(ours: Authority, others: Authority) -> None:
    with metaserver(ours.issue("server", "IP:127.0.0.1"), clients_of=ours) as (url, tickets):
        assert outcome(url, ours, ours.issue("client", "DNS:decode")) == PostOutcome("key", ok=True)
        assert len(tickets) == 1
        without = outcome(url, ours)
        assert not without.ok
        assert "does it want a client certificate (tls_config.ssl_certfile)?" in without.reason
        for wrong in (others.issue("client", "DNS:decode"), ours.issue("old", "DNS:decode", days=-1)):
            found = outcome(url, ours, wrong)
            assert not found.ok
            assert "does it not trust our client certificate (tls_config.ssl_certfile)?" in found.reason
        assert len(tickets) == 1


def test_a_key_with_a_password_and_a_token_stay_secret(
    ours: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = ours.issue("secret-client", "DNS:decode", password=PASSWORD)
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    shown = [repr(ConnectorConfig(tls_config=TlsConfig(True, ssl_keyfile_password=PASSWORD)))]
    with (
        caplog.at_level(logging.DEBUG),
        metaserver(ours.issue("server", "IP:127.0.0.1"), clients_of=ours) as (url, tickets),
    ):
        assert outcome(url, ours, own, PASSWORD, token_file=str(token)).ok
        assert tickets == [f"Bearer {TOKEN}"]
        refused = outcome(url.replace("127.0.0.1", "localhost"), ours, own, PASSWORD, token_file=str(token))
        shown.append(refused.reason)
        for password in ("wrong", None):
            with pytest.raises(MetaserverError, match="certificate or token of the metaserver") as error:
                outcome(url, ours, own, password, token_file=str(token))
            shown += [str(error.value), repr(error.value.__cause__)]
        token.chmod(0o640)
        with pytest.raises(MetaserverError, match=f"{token} has mode 0640") as error:
            outcome(url, ours, own, PASSWORD, token_file=str(token))
        shown.append(str(error.value))
    shown += [record.getMessage() for record in caplog.records]
    assert caplog.records, "asyncio logs at this level"
    for line in shown:
        assert PASSWORD not in line
        assert TOKEN not in line
