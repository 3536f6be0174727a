# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's bootstrap server, which routers for MooncakeConnector ask for its engine id."""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.channels import HOST
from harness.connectors import config_of, scheduler_connector
from harness.ports import release_port, reserve_port, reserve_ports
from vllm_ascend_pd.connector.bootstrap_server import BootstrapServer, answer_of
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.signed_addresses import is_signed_listener
from vllm_ascend_pd.transport.secret_files import cluster_secret, new_secret, write_new


def talk(port: int, content: bytes, timeout_s: float = 20.0) -> bytes:
    with socket.create_connection((HOST, port), timeout=timeout_s) as connection:
        connection.sendall(content)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


@pytest.fixture
def bootstrap() -> Iterator[BootstrapServer]:
    server = BootstrapServer(HOST, 0, answer_of("prefill-0", "prefill-0-12ab", HOST, 5600))
    yield server
    server.close(5)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /query", 200), ("GET /query?a=b", 200), ("POST /query", 405), ("GET /", 404), ("GET /register", 404)],
)
def test_bootstrap_answers(bootstrap: BootstrapServer, request_line: str, status: int) -> None:
    answer = talk(bootstrap.port, f"{request_line} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert f"content-length: {len(body)}".encode() in head
    if status == 200:
        entry = b'{"engine_id":"prefill-0","worker_addr":{"0":{"0":"127.0.0.1:5600"}},"started_as":"prefill-0-12ab"}'
        assert body == b'{"0":' + entry + b"}"


@pytest.mark.parametrize("content", [b"GET /query HTTP/1.1\r\n" + 40000 * b"x", b"\xff\xfe\r\n\r\n"])
def test_bootstrap_survives_nonsense(bootstrap: BootstrapServer, content: bytes) -> None:
    with contextlib.suppress(OSError):  # closed before everything was sent
        assert b" 200 " not in talk(bootstrap.port, content)
    assert b" 200 " in talk(bootstrap.port, b"GET /query HTTP/1.1\r\n\r\n")


def test_silent_connections_do_not_keep_others_out(bootstrap: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ascend_pd.connector.bootstrap_server._TIMEOUT_S", 0.5)
    silent = [socket.create_connection((HOST, bootstrap.port), timeout=20) for _ in range(80)]
    try:
        for each in silent:
            assert each.recv(1) == b"", "closed after its time"
        assert b" 200 " in talk(bootstrap.port, b"GET /query HTTP/1.1\r\n\r\n")
    finally:
        for each in silent:
            each.close()


def test_bootstrap_closes(bootstrap: BootstrapServer) -> None:
    with socket.create_connection((HOST, bootstrap.port), timeout=20) as waiting:
        bootstrap.close(5)
        assert waiting.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(asyncio.open_connection(HOST, bootstrap.port))


# As the connector starts it.


@contextlib.contextmanager
def prefill(model: Path, kv_port: int, engine_id: str = "prefill", **extra: Any) -> Iterator[Any]:
    """The scheduler's connector of a prefill engine. `extra`: fields of vLLM's `ParallelConfig`, and our settings."""
    parallel = {name: extra.pop(name) for name in list(extra) if name.startswith("data_parallel")}
    transfer = {"kv_role": "kv_producer", "kv_port": kv_port, "engine_id": engine_id}
    config = config_of(model, transfer | {"kv_connector_extra_config": extra})
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    with scheduler_connector(config) as connector:
        yield connector


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", HOST)
    monkeypatch.delenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", raising=False)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """For bootstrap, and three engines' tickets in a row."""
    found = [reserve_port(), *reserve_ports(3)]
    yield found
    for port in found:
        release_port(port)


def query(port: int) -> dict[str, Any]:
    return json.loads(talk(port, b"GET /query HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("by_variable", [False, True], ids=["setting", "variable"])
def test_an_engine_says_where_it_takes_tickets(
    model: Path, ports: list[int], monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    bootstrap, kv_port, *_ = ports
    if by_variable:
        monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(bootstrap))
    with prefill(model, kv_port, **({} if by_variable else {"bootstrap_port": bootstrap})) as connector:
        listener = connector._role._held.listener
        [(rank, engine)] = query(bootstrap).items()
        assert (rank, engine["engine_id"]) == ("0", "prefill")
        assert engine["worker_addr"] == {"0": {"0": f"{HOST}:{listener.port}"}}
        assert engine["started_as"].startswith("prefill-")
    with pytest.raises(OSError, match="refused"):
        query(bootstrap)


def test_engines_of_a_further_host_go_on_counting() -> None:
    engines = json.loads(answer_of("prefill_dp8", "prefill_dp8-1234", HOST, 7008, siblings=1))
    assert [each["engine_id"] for each in engines.values()] == ["prefill_dp8", "prefill_dp9"]
    assert engines["1"]["worker_addr"]["0"]["0"] == f"{HOST}:7009"


def test_without_a_port_there_is_no_server(model: Path, ports: list[int]) -> None:
    with prefill(model, ports[1]):
        assert not any(thread.name == "pd-bootstrap" for thread in threading.enumerate())


def test_the_first_of_data_parallel_engines_answers_for_all(model: Path, ports: list[int]) -> None:
    bootstrap, kv_port, *_ = ports
    sizes = {"data_parallel_size_local": 3, "bootstrap_port": bootstrap}
    first = prefill(model, kv_port, "prefill_dp0", data_parallel_rank_local=0, data_parallel_index=0, **sizes)
    second = prefill(model, kv_port, "prefill_dp1", data_parallel_rank_local=1, data_parallel_index=1, **sizes)
    with first, second as other:
        engines = query(bootstrap)
        assert [each["engine_id"] for each in engines.values()] == ["prefill_dp0", "prefill_dp1", "prefill_dp2"]
        addresses = [each["worker_addr"]["0"]["0"] for each in engines.values()]
        assert addresses == [f"{HOST}:{kv_port + rank}" for rank in range(3)]
        assert "started_as" not in engines["1"]
        assert other._role._held.listener.port == kv_port + 1
        assert "prefill_dp1" in other._role._held.listener._names


def test_with_a_secret_the_addresses_of_all_engines_are_signed(model: Path, ports: list[int], tmp_path: Path) -> None:
    bootstrap, kv_port, *_ = ports
    file = tmp_path / "secret"
    write_new(file, new_secret())
    secret = cluster_secret(file)
    assert secret is not None
    sizes = {"data_parallel_size_local": 2, "data_parallel_rank_local": 0, "data_parallel_index": 0}
    with prefill(model, kv_port, "prefill_dp0", bootstrap_port=bootstrap, secret_file=str(file), **sizes):
        first, second = query(bootstrap).values()
    for rank, engine in enumerate((first, second)):
        assert is_signed_listener(secret, engine["signature"], f"prefill_dp{rank}", HOST, kv_port + rank)


def test_a_port_in_use_is_an_error(model: Path, ports: list[int]) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"bootstrap_port: cannot listen.*by process {os.getpid()} "),
            prefill(model, ports[1], bootstrap_port=taken),
        ):
            pass
