# SPDX-License-Identifier: Apache-2.0
"""The proxy process behind TLS, with real certificates. Decode's own client posts the tickets. test_gateway.py has
mutual TLS."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from engine_standin import DecodeEngine, PrefillEngine, Servers, make_ticket
from proxy_cluster import COMPLETION, eventually, running_proxy

from harness.certificates import Authority, Certificate
from vllm_ascend_pd.cli import main
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver import MetaserverClient, MetaserverSettings, PostOutcome

PASSWORD = "password-of-the-proxys-key"


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.cert))


class Proxy:
    """A process between stand-ins for engines."""

    def __init__(self) -> None:
        self.prefill, self.decode = PrefillEngine(), DecodeEngine()
        self.url = ""

    def ask(self, verify: ssl.SSLContext | bool = True, **fields: object) -> httpx.Response:
        body = {**COMPLETION, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, verify=verify, trust_env=False, timeout=30)


@contextmanager
def proxy_with(*options: str) -> Iterator[Proxy]:
    proxy = Proxy()
    with Servers() as servers:
        urls = servers.start(lambda _: proxy.prefill.app), servers.start(lambda _: proxy.decode.app)
        with running_proxy(*urls, *options) as (_, port):
            proxy.url = f"https://127.0.0.1:{port}"
            yield proxy


@contextmanager
def engine_behind_tls(certificate: Certificate) -> Iterator[str]:
    """The URL of a decode engine, as https:// has it."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        DecodeEngine().app, log_config=None, ssl_certfile=str(certificate.cert), ssl_keyfile=str(certificate.key)
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


def withheld(engine: str, monkeypatch: pytest.MonkeyPatch, trusted: Path | None = None) -> str:
    """Why a proxy process gives an engine nothing, by its `/health`. `trusted`: the only authority that it knows."""
    if trusted is not None:
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with running_proxy("http://127.0.0.1:9", engine) as (_, port):

        def said() -> dict[str, str]:
            health = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()
            return {**health["withheld"]["decode"], **({engine: ""} if health["decode"][engine] == "ok" else {})}

        eventually(said)
        return said()[engine]


def test_an_engine_behind_an_authority_of_ones_own(
    ours: Authority, others: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_behind_tls(ours.issue("engine", "IP:127.0.0.1")) as engine:
        unknown = withheld(engine, monkeypatch, others.cert)
        assert unknown.endswith("no TLS connection: its certificate is of an unknown authority (SSL_CERT_FILE)")
        assert withheld(engine, monkeypatch, ours.cert) == ""
        assert withheld(engine.replace("https", "http"), monkeypatch).endswith(": does it want https://?")


@pytest.mark.parametrize(
    ("host", "days", "reason"), [("DNS:other", 2, "is for another host"), ("IP:127.0.0.1", -1, "has expired")]
)
def test_an_engine_with_a_wrong_certificate(
    host: str, days: int, reason: str, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_behind_tls(ours.issue("wrong-engine", host, days)) as engine:
        assert withheld(engine, monkeypatch, ours.cert).endswith(f"no TLS connection: its certificate {reason}")


def posted(proxy: Proxy, trusted: Authority, authority: Authority) -> PostOutcome:
    """Posts a ticket by decode's own client, for a request that waits. Returns the outcome. `authority`: the only one
    that decode trusts."""
    proxy.decode.needs_prefill = False
    proxy.decode.hangs_after_first_token = True
    settings = MetaserverSettings(ca_file=str(authority.cert), retries=1, backoff_base_s=0.01)
    decode = MetaserverClient(settings, own_host="127.0.0.1")
    try:
        body = {**COMPLETION, "stream": True}
        url = f"{proxy.url}/v1/completions"
        with httpx.stream("POST", url, json=body, verify=trusting(trusted), trust_env=False, timeout=30) as response:
            events = response.iter_raw()
            next(events)
            received = proxy.decode.received[-1]
            ticket = make_ticket(f"cmpl-{received.headers['x-request-id']}-0", "t")
            decode.post("key", received.body["kv_transfer_params"]["metaserver"], ticket)
            outcomes: list[PostOutcome] = []
            eventually(lambda: outcomes.extend(decode.poll()) or outcomes)
    finally:
        decode.close()
    [outcome] = outcomes
    return outcome


def test_one_port_for_all_by_a_certificate_whose_key_has_a_password(
    ours: Authority, others: Authority, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text(f"{PASSWORD}\n")
    password.chmod(0o600)
    certificate = ours.issue("locked", "IP:127.0.0.1", password=PASSWORD)
    files = ("--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key))
    with proxy_with(*files, "--tls-key-password-file", str(password)) as proxy:
        port = httpx.URL(proxy.url).port
        assert proxy.ask(trusting(ours)).status_code == 200
        # The stand-in for decode has posted to where it was told, by TLS.
        metaserver = proxy.decode.received[0].body["kv_transfer_params"]["metaserver"]
        assert metaserver == proxy.url + METASERVER_PATH
        assert proxy.decode.metaserver_answers == [(200, {"status": "ok"})]
        assert posted(proxy, ours, ours) == PostOutcome("key", ok=True)
        refused = posted(proxy, ours, others)
        assert "its certificate is refused" in refused.reason
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            proxy.ask(trusting(others))
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=COMPLETION, trust_env=False, timeout=30)


@pytest.fixture(scope="module")
def certificate(ours: Authority) -> Certificate:
    return ours.issue("options", "IP:127.0.0.1")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tls-cert", "{cert}"), "--tls-cert and --tls-key go together"),
        (("--tls-cert", "{cert}", "--tls-key", "/none"), "cannot be used"),
        (("--tls-cert", "{cert}", "--tls-key", "{other}"), "cannot be used"),
        (("--tls-cert", "{cert}", "--tls-key", "{locked}"), "cannot be used"),
        (("--tls-cert", "{cert}", "--tls-key", "{key}", "--metaserver-url", "http://p:1/v1/metaserver"), "https://"),
        (("--tls-key-password-file", "/none"), "needs --tls-cert"),
    ],
)
def test_wrong_files_are_one_clear_line(
    options: tuple[str, ...],
    reason: str,
    ours: Authority,
    certificate: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {"cert": certificate.cert, "key": certificate.key}
    if "{other}" in options:
        named["other"] = ours.issue("another", "IP:127.0.0.1").key
    if "{locked}" in options:
        named["locked"] = ours.issue("locked-alone", "IP:127.0.0.1", password=PASSWORD).key
    filled = [option.format(**named) for option in options]
    engines = ("--prefill", "http://p:1", "--decode", "http://d:1")
    monkeypatch.setattr(sys, "argv", ["vllm-ascend-pd", "proxy", "--port", "0", *engines, *filled])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-ascend-pd: ")
    assert reason in line
    assert PASSWORD not in line
