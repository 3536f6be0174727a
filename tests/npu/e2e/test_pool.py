# SPDX-License-Identifier: Apache-2.0
"""Ours beside vllm-ascend's AscendStoreConnector in a MultiConnector, on both sides, as its guides combine them.

The pool is Mooncake's own store with its master, over the emulated NPUs. Prefill fills it and reads from it.
"""

import dataclasses
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

import cann_on_host
from harness.agreement import assert_agree
from harness.client import Client, Completion, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.engines import HOST, Engine, EngineConfig, script
from harness.failures import wait_all_blocks_free
from harness.models import TINY, for_npu
from harness.plain_http import PLAIN_HTTP
from harness.pool import ClusterPool, Reference, long
from harness.ports import release_port, reserve_ports
from harness.processes import ManagedProcess
from harness.waiting import wait_until
from npu_engines import one_to_one

pytestmark = [pytest.mark.npu, pytest.mark.timeout(600)]

BLOCK = 128
PROMPT = 300
WHOLE_BLOCKS = 256
"""Tokens of such a prompt that the pool keeps."""
RECEIVED = 3 * BLOCK * for_npu(TINY).kv_bytes_per_token
"""Bytes of such a prompt that are pushed."""


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The file with which engines find the store, whose master runs."""
    folder = tmp_path_factory.mktemp("mooncake")
    rpc, metrics = reserve_ports(2)
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "ascend",
        "device_name": "",
        "master_server_address": f"{HOST}:{rpc}",
        "global_segment_size": "128MB",
        "local_buffer_size": "64MB",
    }
    (folder / "mooncake.json").write_text(json.dumps(settings))
    command = [script("mooncake_master"), "--rpc_port", str(rpc), "--metrics_port", str(metrics)]
    master = ManagedProcess("mooncake_master", command, os.environ, folder / "master.log")

    def listens() -> bool:
        with suppress(OSError), socket.create_connection((HOST, rpc), timeout=1):
            return True
        return False

    try:
        wait_until(listens, 30)
        yield str(folder / "mooncake.json")
    finally:
        master.stop()
        release_port(rpc)
        release_port(metrics)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that names blocks which prefill fails to load (`plugins/failing_loads.py`)."""
    return tmp_path_factory.mktemp("failing") / "blocks"


@pytest.fixture(scope="module", params=[True, long(False)], ids=["ours-first", "ours-second"])
def config(request: pytest.FixtureRequest, mooncake: str, failing: Path) -> ClusterConfig:
    """Where ours is the first, prefill computes the KV again that cannot be loaded. Else it ends the requests."""

    def with_pool(engine: EngineConfig) -> EngineConfig:
        return dataclasses.replace(
            engine,
            beside=(("backend", "mooncake"), ("lookup_rpc_port", "0")),
            beside_connector="AscendStoreConnector",
            ours_first=request.param,
        )

    # Keys of the pool are hashes of tokens: both sides need the same seed.
    env = (("MOONCAKE_CONFIG_PATH", mooncake), ("PYTHONHASHSEED", "0"), ("VLLM_SERVER_DEV_MODE", "1"))
    alone = one_to_one(f"pool-{'ours-first' if request.param else 'ours-second'}", 1, 1, env=env)
    prefill, decode = (tuple(map(with_pool, engines)) for engines in (alone.prefill, alone.decode))
    prefill = tuple(
        dataclasses.replace(
            engine,
            load_failure_policy="recompute" if request.param else "fail",
            env=(*engine.env, ("VLLM_ASCEND_PD_TEST_FAIL_LOADS", str(failing))),
        )
        for engine in prefill
    )
    return dataclasses.replace(alone, prefill=prefill, decode=decode)


@pytest.fixture
def cluster(config: ClusterConfig, cluster_pool: ClusterPool) -> Iterator[Cluster]:
    """After every test its engines have all their blocks back."""
    cluster = cluster_pool.get(config)
    yield cluster
    wait_all_blocks_free(cluster)


def loaded_tokens(engine: Engine) -> float:
    """By any of its connectors."""
    return engine.metric("vllm:external_prefix_cache_hits_total")


def received_bytes(completion: Completion) -> int:
    return 0 if completion.kv_transfer_params is None else completion.kv_transfer_params["received_bytes"]


def forget_prefixes(cluster: Cluster) -> None:
    wait_all_blocks_free(cluster)  # vLLM forgets nothing before, and the pool has all of a prompt then
    for engine in (*cluster.prefill, *cluster.decode):
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=30, **PLAIN_HTTP).raise_for_status()


def test_prompts_are_pushed(config: ClusterConfig, client: Client, reference: Reference) -> None:
    """Prompts of each order are its own: the pool still names blocks of the engines before, which are gone."""
    prompts = [
        random_prompt(tokens, f"{config} pushed-{i}") for i, tokens in enumerate(2 * (2, 127, 129, PROMPT, 1000))
    ]
    completions = at_once(client.complete, prompts, concurrency=8)
    assert_agree(reference, prompts, completions)
    assert all(map(received_bytes, completions))


def test_a_prompt_comes_again(config: ClusterConfig, cluster: Cluster, client: Client, reference: Reference) -> None:
    """Neither engine has it cached any more, and the pool has it: prefill restores it from there and pushes it.

    On decode the pool loads nothing unless it has `consumer_is_to_load`, so there the order makes no difference.
    """
    [prefill] = cluster.prefill
    prompt = random_prompt(PROMPT, f"{config} again")
    first = client.complete(prompt)
    assert received_bytes(first) == RECEIVED
    forget_prefixes(cluster)
    before = loaded_tokens(prefill)
    again = client.complete(prompt)
    assert_agree(reference, [prompt, prompt], [first, again])
    restored = loaded_tokens(prefill) - before
    assert (received_bytes(again), restored) == (RECEIVED, WHOLE_BLOCKS)


@pytest.mark.skipif(not cann_on_host.is_active(), reason="other KV is put where nothing was loaded")
def test_a_block_cannot_be_loaded(
    config: ClusterConfig, cluster: Cluster, client: Client, reference: Reference, failing: Path
) -> None:
    """Each of those that prefill restores. It must not have pushed what was never loaded."""
    [prefill] = cluster.prefill
    try:
        for number in range(WHOLE_BLOCKS // BLOCK):
            prompt = random_prompt(PROMPT, f"{config} fails-{number}")
            first = client.complete(prompt)
            forget_prefixes(cluster)
            failing.write_text(str(number))
            if prefill.config.load_failure_policy == "fail":
                with pytest.raises(httpx.HTTPStatusError, match="502"):
                    client.complete(prompt)
            else:
                again = client.complete(prompt)
                assert_agree(reference, [prompt, prompt], [first, again])
                assert received_bytes(again)
            failing.unlink()
    finally:
        failing.unlink(missing_ok=True)
