# SPDX-License-Identifier: Apache-2.0
"""Pages of other origins (CORS): the headers that a browser gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_standin import DecodeEngine
from proxy_cluster import COMPLETION, STREAM, Cluster, running_cluster
from starlette.middleware.cors import CORSMiddleware

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.proxy.http.messages import client_response_headers

PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"
CLOSED = (METASERVER_PATH, METASERVER_PATH + "/failure", "/admin/engines", "/status.json", "/health", "/metrics", "/")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-secret")
    with running_cluster(allowed_origins=f'["{PAGE}"]', admin_token_file=str(token)) as cluster:
        yield cluster


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"])
def test_preflight_is_answered(cluster: Cluster, path: str) -> None:
    answer = cluster.client.options(path, headers=PREFLIGHT)
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in answer.headers
    assert cluster.decode.received == []


def test_preflight_of_another_page_is_refused(cluster: Cluster) -> None:
    answer = cluster.client.options("/v1/completions", headers={**PREFLIGHT, "Origin": "https://other.example"})
    assert answer.status_code == 400
    assert ALLOWED not in answer.headers


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])
def test_answers_and_errors_may_be_read(cluster: Cluster, stream: dict[str, object]) -> None:
    headers = {"Origin": PAGE}
    well = cluster.client.post("/v1/completions", headers=headers, json={**COMPLETION, **stream})
    assert (well.status_code, well.headers[ALLOWED], well.headers["vary"]) == (200, PAGE, "Origin")
    wrong = cluster.client.post("/v1/completions", headers=headers, json={"truncate_prompt_tokens": -1})
    assert (wrong.status_code, wrong.headers[ALLOWED]) == (400, PAGE)
    cluster.prefill.transfer_error = "it is gone"
    failed = cluster.client.post("/v1/completions", headers=headers, json={**COMPLETION, **stream})
    assert (failed.status_code, failed.headers[ALLOWED]) == (502, PAGE)
    method = cluster.client.delete("/v1/completions", headers=headers)
    assert (method.status_code, method.headers[ALLOWED]) == (405, PAGE)


@pytest.mark.parametrize(
    "path",
    ["/v1/responses/resp_7", "/v1/responses/resp_7/cancel", "/v1/audio/transcriptions"],
)
def test_a_page_reads_why_a_route_is_not_served(cluster: Cluster, path: str) -> None:
    assert cluster.client.options(path, headers=PREFLIGHT).headers[ALLOWED] == PAGE
    answer = cluster.client.post(path, headers={"Origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (404, PAGE)
    longer = cluster.client.post(f"{path}/further", headers={"Origin": PAGE})
    assert (longer.status_code, ALLOWED in longer.headers) == (404, False)


def test_refusal_of_a_full_proxy_may_be_read() -> None:
    with running_cluster(allowed_origins='["*"]', max_concurrent=1, max_waiting=0) as cluster:
        cluster.decode.hangs_after_first_token = True
        with cluster.client.stream("POST", "/v1/completions", json={**COMPLETION, **STREAM}):
            refused = cluster.client.post("/v1/completions", headers={"Origin": PAGE}, json=COMPLETION)
            assert (refused.status_code, refused.headers[ALLOWED]) == (429, "*")


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("origins", [f'["{PAGE}"]', '["*"]'], ids=["named", "all"])
def test_other_routes_stay_closed_to_pages(path: str, origins: str, tmp_path: Path) -> None:
    """The routes of operators and of decode engines, and the status page."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-secret")
    with running_cluster(allowed_origins=origins, admin_token_file=str(token)) as cluster:
        assert cluster.client.options(path, headers=PREFLIGHT).status_code == 405
        for method in ("GET", "POST"):
            headers = {"Origin": PAGE, "Authorization": "Bearer a-secret"}
            assert ALLOWED not in cluster.client.request(method, path, headers=headers).headers


def test_no_page_is_allowed_by_default() -> None:
    with running_cluster() as cluster:
        assert cluster.client.options("/v1/completions", headers=PREFLIGHT).status_code == 400
        answer = cluster.client.get("/v1/models", headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert ALLOWED not in answer.headers


def test_an_engines_cors_headers_are_not_passed_on() -> None:
    """Engines do not know which pages may use the proxy."""
    engine = DecodeEngine()
    engine.app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)
    with running_cluster(decode_engine=engine) as cluster:
        headers = {"Origin": PAGE, "Cookie": "a=b"}
        direct = httpx.get(f"{cluster.decode_url}/v1/models", headers=headers)
        assert (direct.headers[ALLOWED], direct.headers["vary"]) == (PAGE, "Origin")
        answer = cluster.client.get("/v1/models", headers=headers)
        assert not {name for name in answer.headers if name.startswith("access-control-")}
        assert answer.headers.get("vary") in (None, "Origin"), "the proxy's own"


def test_vary_names_origin_once() -> None:
    engine = DecodeEngine()
    engine.app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)
    with running_cluster(decode_engine=engine, allowed_origins=f'["{PAGE}"]') as cluster:
        answer = cluster.client.get("/v1/models", headers={"Origin": PAGE, "Cookie": "a=b"})
        assert (answer.headers[ALLOWED], answer.headers["vary"]) == (PAGE, "Origin")
    sent = [(b"vary", b"Accept-Encoding, origin"), (b"Vary", b"Origin"), (b"Vary", b"Cookie")]
    assert client_response_headers(sent) == [(b"vary", b"Accept-Encoding"), (b"vary", b"Cookie")]
