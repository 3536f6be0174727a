# SPDX-License-Identifier: Apache-2.0
"""The proxy as a process: its command line, how it ends, and its connections."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import COMPLETION, command, eventually, proxy_process, running_proxy

from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.cli import main
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.ticket_client import PostOutcome


def test_idle_connections_are_closed() -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    with proxy_process(prefill, decode) as (process, port):
        proxy = psutil.Process(process.pid)

        def connections() -> int:
            return len([c for c in proxy.net_connections() if c.status != psutil.CONN_LISTEN])

        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=COMPLETION, timeout=30, **PLAIN_HTTP)
        assert answer.status_code == 200
        eventually(lambda: connections() == 0)


def test_another_proxy_takes_the_place_of_a_killed_one() -> None:
    """The client sees the connection closed, decode gets a clear reason, and a new proxy serves at the same port."""
    prefill, decode = PrefillEngine(), DecodeEngine()
    prefill.hangs = True
    client = MetaserverClient(ConnectorConfig(), own_host="127.0.0.1")
    with Servers() as servers:
        urls = servers.start(lambda _: prefill.app), servers.start(lambda _: decode.app)
        decode.needs_prefill = False
        decode.hangs_after_first_token = True
        with running_proxy(*urls) as (process, port):
            body = {**COMPLETION, "stream": True}
            url = f"http://127.0.0.1:{port}"
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30, **PLAIN_HTTP) as response:
                events = response.iter_raw()
                next(events)
                request_id = decode.received[0].headers["x-request-id"]
                ticket = {"request_id": f"cmpl-{request_id}-0", "remote_engine_id": "d", "ticket_id": "t"}
                client.post("key", url + METASERVER_PATH, ticket)
                assert prefill.working.wait(30)
                process.kill()
                with pytest.raises(httpx.RemoteProtocolError):
                    list(events)
            process.wait(10)
            assert decode.cancelled.wait(10)
            assert prefill.cancelled.wait(10)
        prefill.hangs = decode.hangs_after_first_token = False
        decode.needs_prefill = True
        with running_proxy(*urls, port=port):
            # The retries of the post may have ended before it came up: either way it is clear what happened.
            outcomes: list[PostOutcome] = []
            eventually(lambda: outcomes.extend(client.poll()) or outcomes)
            [outcome] = outcomes
            assert not outcome.ok
            assert "unreachable" in outcome.reason or "does not know this request" in outcome.reason
            assert httpx.post(f"{url}/v1/completions", json=COMPLETION, timeout=30, **PLAIN_HTTP).is_success
    client.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_requests_and_the_process(number: signal.Signals) -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    decode.hangs_after_first_token = True
    with proxy_process(prefill, decode) as (process, port):
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {**COMPLETION, "stream": True}
        headers = {"Authorization": "Bearer confidential"}
        with httpx.stream("POST", url, json=body, headers=headers, **PLAIN_HTTP) as response:
            events = response.iter_raw()
            next(events)
            process.send_signal(number)
            stopped_at = time.monotonic()
            assert b"the proxy is shutting down" in b"".join(events)
        _, log = process.communicate(timeout=5)
        assert time.monotonic() - stopped_at < 3
    assert process.returncode == 0
    assert "Traceback" not in log
    assert "confidential" not in log
    assert decode.cancelled.wait(5)


def test_signal_ends_uploads(token_file: str) -> None:
    """All kinds of uploads end at once, each with the error of its route."""
    paths = (
        "/v1/completions",
        METASERVER_PATH,
        METASERVER_PATH + "/failure",
        METASERVER_PATH + "/waiting",
        "/admin/engines",
    )
    with (
        ExitStack() as connections,
        proxy_process(PrefillEngine(), DecodeEngine(), "--admin-token-file", token_file) as (process, port),
    ):
        uploads = []
        for path in paths:
            upload = HTTPConnection("127.0.0.1", port, timeout=10)
            connections.callback(upload.close)
            upload.putrequest("POST", path)
            upload.putheader("Authorization", "Bearer a-secret")
            upload.putheader("Content-Length", "10")
            upload.endheaders(b"{")
            uploads.append(upload)
        httpx.get(f"http://127.0.0.1:{port}/version", timeout=30, **PLAIN_HTTP)  # so the proxy has read them
        process.send_signal(signal.SIGTERM)
        stopped_at = time.monotonic()
        for path, upload in zip(paths, uploads, strict=True):
            answer = upload.getresponse()
            error = json.loads(answer.read())["error"]
            assert answer.status == 503
            reason = error if path.startswith(METASERVER_PATH) else error["message"]
            assert reason == "the proxy is shutting down"
        _, log = process.communicate(timeout=5)
        assert time.monotonic() - stopped_at < 2
    assert "Traceback" not in log
    assert process.returncode == 0


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs root, to have a name server of its own",
)
def test_names_that_get_no_answer_touch_no_other_engine_and_delay_no_end(tmp_path: Path) -> None:
    nameserver = tmp_path / "resolv.conf"
    nameserver.write_text("nameserver 127.0.0.77\n")
    before = (
        "import ctypes, subprocess\n"
        "assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS\n"
        "subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        f"subprocess.run(['mount', '--bind', '{nameserver}', '/etc/resolv.conf'], check=True)"
    )
    with Servers() as servers, socket.socket(type=socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.77", 53))
        prefill, decode = (
            servers.start(lambda _, engine=engine: engine.app).replace("127.0.0.1", "localhost")
            for engine in (PrefillEngine(), DecodeEngine())
        )
        others = [option for number in range(9) for option in ("--prefill", f"dns+http://silent-{number}.test:1")]
        with running_proxy(prefill, decode, *others, before=before) as (process, port):
            url = f"http://127.0.0.1:{port}"

            health = httpx.get(f"{url}/health", timeout=30, **PLAIN_HTTP).json()
            assert (health["prefill"], health["decode"]) == ({prefill: "healthy"}, {decode: "healthy"})
            assert httpx.post(f"{url}/v1/completions", json=COMPLETION, timeout=30, **PLAIN_HTTP).status_code == 200
            process.send_signal(signal.SIGTERM)
            stopped_at = time.monotonic()
            process.communicate(timeout=30)
            assert time.monotonic() - stopped_at < 3
        assert process.returncode == 0


def test_failed_background_task_ends_the_process(tmp_path: Path) -> None:
    """The library of the health checks fails while a request is in flight."""
    prefill, decode = PrefillEngine(), DecodeEngine()
    decode.hangs_after_first_token = True
    broken = tmp_path / "broken"
    breaks = f"import os, random\nrandom.uniform = lambda *_: 1 / (not os.path.exists({str(broken)!r}))"
    with proxy_process(prefill, decode, before=breaks) as (process, port):
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json={**COMPLETION, "stream": True}, timeout=30, **PLAIN_HTTP) as response:
            events = response.iter_raw()
            next(events)
            broken.touch()
            assert b"the proxy is shutting down" in b"".join(events)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ZeroDivisionError" in log
    assert "the proxy stops" in log
    assert decode.cancelled.wait(5)


def test_proxy_that_cannot_start_ends() -> None:
    breaks = (
        "from vllm_ascend_pd.transport.names import HostNames\n"
        "async def broken(*_): raise ZeroDivisionError\n"
        "HostNames.look_up = broken"
    )
    options = ("--port", "0", "--prefill", "dns+http://localhost:1", "--decode", "http://127.0.0.1:1")
    run = subprocess.run(command(*options, before=breaks), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "ZeroDivisionError" in run.stderr
    assert "the proxy stops" in run.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--prefill", "http://p:1"), "--decode"),
        (("--prefill", "p:1", "--decode", "http://d:1"), "prefill engine 'p:1' is not a URL"),
        (("--prefill", "http://p:1/v1", "--decode", "http://d:1"), "without a path"),
        (("--prefill", "http://p:1", "--decode", "http://d:1", "--max-concurrent", "0"), "--max-concurrent must be"),
        (("--prefill", "http://p:1", "--decode", "http://d:1", "--host", "0.0.0.0"), "--metaserver-url"),
        (("--prefill", "http://p:1", "--decode", "http://d:1", "--attempts", "0"), "--attempts must be"),
        (("--prefil", "http://p:1"), "--prefil"),
        (("--prefill", "http://p:1", "--decode", "http://d:1", "--metaserver-token-file", "/"), "not a regular file"),
        (("--prefill", "http://p:1", "--decode", "http://d:1", "--admin-token-file", "/none"), "cannot be read"),
        (("--prefill", "dns+http://p", "--decode", "http://d:1"), "give the port"),
        (("--prefill", "http://p:1", "--decode", "http://p:1/"), "http://p:1 is given as a prefill and as a decode"),
    ],
)
def test_wrong_option_is_refused_in_one_clear_line(
    options: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same without a process of its own."""
    monkeypatch.setattr("sys.argv", ["vllm-ascend-pd", "proxy", "--port", "0", *options])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("vllm-ascend-pd: ")
    assert reason in line


def test_taken_port_is_named_in_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ("--port", str(taken.getsockname()[1]), "--prefill", "http://p:1", "--decode", "http://d:1")
        run = subprocess.run(command(*options), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "cannot listen" in run.stderr
    assert len(run.stderr.splitlines()) == 1
