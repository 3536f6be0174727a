# SPDX-License-Identifier: Apache-2.0
"""The proxy process and engines behind TLS, with real certificates. test_gateway.py has TLS before the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_standin import DecodeEngine, Servers
from proxy_cluster import eventually, running_proxy

from harness.certificates import Authority
from harness.proxy_state import engine_states


def withheld(engine: str, monkeypatch: pytest.MonkeyPatch, trusted: Path | None = None) -> str:
    """Why a proxy process gives an engine nothing, by its `/health`. `trusted`: the only authority that it knows."""
    if trusted is not None:
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with running_proxy("http://127.0.0.1:9", engine) as (_, port):

        def said() -> dict[str, str]:
            states = engine_states(f"http://127.0.0.1:{port}")["decode"]
            return {url: state for url, state in states.items() if not state.startswith(("new", "failing"))}

        eventually(said)
        return said()[engine]


def test_an_engine_behind_an_authority_of_ones_own(
    ours: Authority, others: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Servers() as servers:
        engine = servers.start(lambda _: DecodeEngine().app, certificate=ours.issue("engine", "IP:127.0.0.1"))
        unknown = withheld(engine, monkeypatch, others.cert)
        assert "no TLS connection: its certificate is not trusted (SSL_CERT_FILE): " in unknown
        assert withheld(engine, monkeypatch, ours.cert) == "healthy"
        assert withheld(engine.replace("https", "http"), monkeypatch).endswith(": does it want https://?")


@pytest.mark.parametrize(
    ("host", "days", "reason"),
    [("DNS:other", 2, "it is for another host"), ("IP:127.0.0.1", -1, "certificate has expired")],
)
def test_an_engine_with_a_wrong_certificate(
    host: str, days: int, reason: str, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Servers() as servers:
        engine = servers.start(lambda _: DecodeEngine().app, certificate=ours.issue("wrong-engine", host, days))
        assert withheld(engine, monkeypatch, ours.cert).endswith(f"is not trusted (SSL_CERT_FILE): {reason}")
