# SPDX-License-Identifier: Apache-2.0
"""examples/gateway/nginx.conf: the real nginx before a proxy process between stand-ins for engines."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import httpx
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers, make_ticket
from proxy_cluster import COMPLETION, eventually, running_proxy

from harness.certificates import Authority, Certificate
from harness.gateway import needs_nginx, running_nginx
from harness.ports import release_port, reserve_port
from vllm_ascend_pd.core.config import ConnectorConfig, TlsConfig
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.ticket_client import PostOutcome

STREAM = {**COMPLETION, "stream": True}

pytestmark = needs_nginx


@dataclass
class Gateway:
    port: int
    for_decode: str
    """The URL of the metaserver by mutual TLS."""
    trusts_us: ssl.SSLContext
    decode: DecodeEngine
    proxy_port: int

    def client(self) -> httpx.Client:
        url = f"https://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, verify=self.trusts_us, trust_env=False, timeout=30)


@pytest.fixture(scope="module")
def gateway(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    decode = DecodeEngine()
    clients, for_decode = ports = reserve_port(), reserve_port()
    with Servers() as servers, ExitStack() as stack:
        stack.callback(lambda: [release_port(port) for port in ports])
        urls = servers.start(lambda _: PrefillEngine().app), servers.start(lambda _: decode.app)
        _, proxy = stack.enter_context(running_proxy(*urls))
        certificate = ours.issue("gateway", "IP:127.0.0.1")
        changes = {
            "listen 443": f"listen 127.0.0.1:{clients}",
            "listen 8443": f"listen 127.0.0.1:{for_decode}",
            "/etc/pd/gateway.pem": str(certificate.cert),
            "/etc/pd/gateway-key.pem": str(certificate.key),
            "/etc/pd/engines-ca.pem": str(ours.cert),
            "client_header_timeout 20s": "client_header_timeout 1s",
            "limit_conn pd_per_address 256": "limit_conn pd_per_address 3",
        }
        stack.enter_context(running_nginx(folder, proxy, ports, changes))
        trusts_us = ssl.create_default_context(cafile=str(ours.cert))
        yield Gateway(clients, f"https://127.0.0.1:{for_decode}{METASERVER_PATH}", trusts_us, decode, proxy)


@pytest.fixture(autouse=True)
def fresh_engine(gateway: Gateway) -> None:
    gateway.decode.hangs = gateway.decode.hangs_after_first_token = False
    gateway.decode.needs_prefill = True
    gateway.decode.cancelled.clear()


def test_a_stream_passes_token_by_token_and_ends_with_its_client(gateway: Gateway) -> None:
    gateway.decode.hangs_after_first_token = True
    with gateway.client() as client, client.stream("POST", "/v1/completions", json=STREAM) as response:
        assert response.status_code == 200
        chunks = response.iter_raw()  # the stream ends with its iterator
        assert b'"text"' in next(chunks)
        assert not gateway.decode.cancelled.is_set()
    assert gateway.decode.cancelled.wait(10)


def test_a_client_that_leaves_before_its_answer_ends_its_request(gateway: Gateway) -> None:
    gateway.decode.hangs = True
    with gateway.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=COMPLETION, timeout=1)
    assert gateway.decode.cancelled.wait(10)


def test_answers_and_errors_pass_unchanged(gateway: Gateway) -> None:
    wrong = {**COMPLETION, "truncate_prompt_tokens": -1}
    with gateway.client() as client, httpx.Client(trust_env=False) as direct:
        for body, status in ((COMPLETION, 200), (wrong, 400)):
            answers = [
                asked.post(f"{url}/v1/completions", json=body)
                for asked, url in ((client, ""), (direct, f"http://127.0.0.1:{gateway.proxy_port}"))
            ]
            assert [answer.status_code for answer in answers] == [status, status]
            assert answers[0].json().get("error") == answers[1].json().get("error")
        image = "data:image/png;base64," + "x" * (40 << 20)
        assert client.post("/v1/completions", json={**COMPLETION, "prompt": image}).status_code == 200
        for path in ("/admin/engines", "/metrics", "/health", "/status.json", METASERVER_PATH, "/"):
            assert client.get(path).status_code == 404


def test_a_slow_head_is_ended(gateway: Gateway) -> None:
    with (
        socket.create_connection(("127.0.0.1", gateway.port), 30) as plain,
        closing(gateway.trusts_us.wrap_socket(plain, server_hostname="127.0.0.1")) as connection,
    ):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        began_at = time.monotonic()
        assert b"200" not in connection.recv(4096)
        assert time.monotonic() - began_at < 20


def test_one_address_has_a_bounded_number_of_requests(gateway: Gateway) -> None:
    gateway.decode.hangs_after_first_token = True
    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(gateway.client())
            stack.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
        assert stack.enter_context(gateway.client()).get("/v1/models").status_code == 429
    with gateway.client() as client:
        eventually(lambda: client.get("/v1/models").status_code == 200)


def test_tickets_by_mutual_tls(gateway: Gateway, ours: Authority, others: Authority) -> None:
    gateway.decode.needs_prefill = False
    gateway.decode.hangs_after_first_token = True

    def posted(own: Certificate | None) -> PostOutcome:
        files = {} if own is None else {"ssl_certfile": str(own.cert), "ssl_keyfile": str(own.key)}
        tls = TlsConfig(True, ssl_ca_certs=str(ours.cert), **files)
        config = ConnectorConfig(peers=(gateway.for_decode,), metaserver_retries=1, tls_config=tls)
        decode = MetaserverClient(config, own_host="127.0.0.1")
        with (
            closing(decode),
            gateway.client() as client,
            client.stream("POST", "/v1/completions", json=STREAM) as answer,
        ):
            chunks = answer.iter_raw()  # the stream ends with its iterator
            next(chunks)
            engine_id = f"cmpl-{gateway.decode.received[-1].headers['x-request-id']}-0"
            decode.post("key", gateway.for_decode, make_ticket(engine_id, "t"))
            outcomes: list[PostOutcome] = []
            eventually(lambda: outcomes.extend(decode.poll()) or outcomes)
        [outcome] = outcomes
        return outcome

    good = posted(ours.issue("decode", "DNS:decode"))
    assert good == PostOutcome("key", ok=True), good.reason
    assert not posted(None).ok
    assert not posted(others.issue("decode", "DNS:decode")).ok
    decode = ours.issue("decode-itself", "DNS:decode")
    gateway.trusts_us.load_cert_chain(decode.cert, decode.key)
    for path in ("/v1/completions", "/metrics", "/health", "/admin/engines"):
        url = gateway.for_decode.removesuffix(METASERVER_PATH) + path
        assert httpx.get(url, verify=gateway.trusts_us, trust_env=False, timeout=30).status_code == 404
