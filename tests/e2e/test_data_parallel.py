# SPDX-License-Identifier: Apache-2.0
"""Data-parallel engines that are processes of their own, each with its own API server and `--data-parallel-rank`, one
`kv_port` for all: each listens on its own, and tickets reach the one that issued them.

vLLM runs such engines in lockstep, and only for models that route tokens to experts. This one says it does, so that
they are, but has none: vLLM's CPU backend exchanges no tokens between experts.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig, running_cluster
from harness.engines import HOST, PATIENT, EngineConfig, Role
from harness.models import TINY, make_model
from harness.pool import ClusterPool, Reference, ReferencePool
from harness.ports import release_port, reserve_port, reserve_ports

LOCKSTEP = dataclasses.replace(TINY, name="lockstep", config=(("num_experts", 2),))
"""TINY's weights."""

# The short form has data-parallel engines in tests/npu/e2e/test_parallel.py.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(cluster_pool: ClusterPool, models: Path, engine_logs: Path) -> Iterator[Cluster]:
    cluster_pool.stop()
    kv_ports, rpc_port = reserve_ports(2), reserve_port()
    both = ("--data-parallel-size", "2", "--data-parallel-address", HOST, "--data-parallel-rpc-port", str(rpc_port))
    extra = (*PATIENT, ("prefill_first_tokens", 500))  # of the longest prompts
    decode = EngineConfig(Role.DECODE, connector_extra=extra, kv_port=kv_ports[0])
    config = ClusterConfig(
        "decode-dp2-in-two-processes",
        prefill=(EngineConfig(Role.PREFILL, connector_extra=PATIENT),),
        decode=tuple(dataclasses.replace(decode, args=(*both, "--data-parallel-rank", str(rank))) for rank in range(2)),
        model=LOCKSTEP,
    )
    with running_cluster(make_model(LOCKSTEP, models), config, engine_logs) as running:
        yield running
    for port in (*kv_ports, rpc_port):
        release_port(port)


@pytest.fixture
def reference(reference_pool: ReferencePool, single_engine: EngineConfig) -> Reference:
    return reference_pool.get(TINY, single_engine)


def test_decode_engines_that_are_processes_of_their_own(cluster: Cluster, client: Client, reference: Reference) -> None:
    prompts = [random_prompt(tokens, f"external-{i}") for i, tokens in enumerate(2 * (1, 128, 129, 700))]
    completions = at_once(client.complete, prompts, concurrency=4)
    assert [completion.token_ids for completion in completions] == [reference.complete(p) for p in prompts]
    served = [engine.metric("vllm:request_success_total") for engine in cluster.decode]
    assert sum(served) == 8
    assert min(served) > 0
