# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by the integration tests."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.certificates import Authority
from harness.channels import HOST, MakeSocket, echo, plain_sockets
from harness.models import TINY, make_model
from harness.processes import interrupt_on_sigterm
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelServer

if TYPE_CHECKING:
    from proxy_cluster import Cluster

    from harness.ranks import MakePair

pytest.register_assert_rewrite("metaserver_posts", "page_commands", "proxy_commands", "transfer_receiver")


def pytest_configure() -> None:
    interrupt_on_sigterm()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "others")


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A file with the bearer token `a-secret`."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("a-secret\n")
    return str(file)


@pytest.fixture
def secret() -> Secret | None:
    """The cluster's, which side channels have: none, unless a module overrides this."""
    return None


@pytest.fixture
def server(secret: Secret | None) -> Iterator[SideChannelServer]:
    server = SideChannelServer(HOST, 0, echo, secret=secret)
    yield server
    server.close()


@pytest.fixture
def client(secret: Secret | None) -> Iterator[SideChannelClient]:
    client = SideChannelClient(secret=secret)
    yield client
    client.close()


@pytest.fixture
def cluster() -> "Iterator[Cluster]":
    """A proxy with stand-ins for a prefill and a decode engine."""
    from proxy_cluster import running_cluster

    with running_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def idle_cluster() -> "Iterator[Cluster]":
    """For tests whose requests never reach an engine. A module's tests share it."""
    from proxy_cluster import running_cluster

    with running_cluster() as running:
        yield running
        assert running.decode.received == []
        assert running.prefill.received == []


@pytest.fixture
def no_reason_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy soon stops waiting for decode to say why a request failed."""
    from vllm_ascend_pd.proxy.rendezvous import client_endpoint

    monkeypatch.setattr(client_endpoint, "_REASON_SECONDS", 0.5)


@pytest.fixture
def raw() -> Iterator[MakeSocket]:
    with plain_sockets() as make:
        yield make


@pytest.fixture
def make_pair() -> "Iterator[MakePair]":
    from harness.ranks import made_pairs

    with made_pairs() as make:
        yield make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, for vLLM's configuration."""
    return make_model(TINY, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of an engine with a head that drafts."""
    from vllm.engine.arg_utils import EngineArgs

    from harness.decode_scheduler import BLOCK, DRAFTS, MAX_MODEL_LEN
    from harness.models import EAGLE, ONE_LAYER

    folder = tmp_path_factory.mktemp("models")
    head = {"method": "eagle", "model": str(make_model(EAGLE, folder)), "num_speculative_tokens": DRAFTS}
    return EngineArgs(
        model=str(make_model(ONE_LAYER, folder)),
        dtype="float32",
        block_size=BLOCK,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        speculative_config=head,
    ).create_engine_config()


@pytest.fixture(scope="session")
def make_any(drafting: Any) -> Callable[..., Any]:
    """Makes decode's scheduler, of vLLM's real one."""
    from harness.decode_scheduler import EngineScheduler, decode_config

    def make(
        blocks: int,
        drafts: bool = False,
        caching: bool = False,
        failures: str = "fail",
        order: str = "fcfs",
        max_num_seqs: int = 16,
        who_computes: str = "prefill",
        prefill_first: int | str | None = "auto",
        **of: Any,
    ) -> Any:
        config = copy.copy(drafting)
        if not drafts:
            config.speculative_config = None
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.enable_prefix_caching = caching
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.policy = order
        config.scheduler_config.max_num_seqs = max_num_seqs
        return EngineScheduler(decode_config(config, failures, who_computes, prefill_first), blocks, **of)

    return make
