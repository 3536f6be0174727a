# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by the integration tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.certificates import Authority
from harness.channels import HOST, MakeSocket, echo, plain_sockets
from harness.models import TINY, make_model
from harness.processes import interrupt_on_sigterm
from vllm_ascend_pd.transport.curve import Keys
from vllm_ascend_pd.transport.side_channel import Client, Server


def pytest_configure() -> None:
    interrupt_on_sigterm()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "others")


@pytest.fixture
def keys() -> Keys | None:
    """Of side channels: none, but where a module has some."""
    return None


@pytest.fixture
def server(keys: Keys | None) -> Iterator[Server]:
    server = Server(HOST, 0, echo, keys=keys)
    yield server
    server.close()


@pytest.fixture
def client(keys: Keys | None) -> Iterator[Client]:
    client = Client(keys=keys)
    yield client
    client.close()


@pytest.fixture
def raw() -> Iterator[MakeSocket]:
    with plain_sockets() as make:
        yield make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's folder, for vLLM's configuration."""
    return make_model(TINY, tmp_path_factory.mktemp("model"))
