# SPDX-License-Identifier: Apache-2.0
"""Ours beside another connector below vLLM's MultiConnector, on both sides and in either order.

The other is vLLM's ExampleConnector, which keeps the KV of every prompt it has seen in files, and restores it where a
prompt comes again. It reads a prompt from the cache in the first step that computes it, so prompts that are to come
again must fit into one. It can be told to fail (`plugins/failing_pool.py`).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import POISONED_TOKENS, Cluster, ClusterConfig, one_to_one
from harness.engines import Engine, EngineConfig, Role
from harness.failures import poisoned_fails_alone, wait_all_blocks_free
from harness.models import TINY
from harness.plain_http import PLAIN_HTTP
from harness.pool import ClusterPool, Reference, long

pytestmark = pytest.mark.timeout(600)

BLOCK = 128
PROMPT = 300
RESTORED = 256
"""Tokens of such a prompt that ExampleConnector restores: whole blocks, and not the last token."""
RECEIVED = 3 * BLOCK * TINY.kv_bytes_per_token
"""Bytes of such a prompt that are pushed: whole blocks."""


@pytest.fixture(scope="module", params=[long(True), False], ids=["ours-first", "ours-second"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    """Where ours is the first, prefill ends requests whose KV cannot be loaded, and computes long prompts before decode
    gives them blocks. Else it computes the KV again."""
    policy = "fail" if request.param else "recompute"
    long_first = {Role.PREFILL: ("hold_timeout_s", 60.0), Role.DECODE: ("prefill_first_tokens", PROMPT - 1)}

    def beside_another(engine: EngineConfig) -> EngineConfig:
        folder = tmp_path_factory.mktemp(f"kv-of-{engine.label}")
        return dataclasses.replace(
            engine,
            beside=(("shared_storage_path", str(folder)),),
            beside_connector="FailingPool",
            ours_first=request.param,
            connector_extra=(*engine.connector_extra, *([long_first[engine.role]] if request.param else [])),
            load_failure_policy=policy if engine.role is Role.PREFILL else None,
        )

    alone = one_to_one(1, 1)
    return dataclasses.replace(
        alone,
        name=f"multi-{'ours-first' if request.param else 'ours-second'}",
        prefill=tuple(map(beside_another, alone.prefill)),
        decode=tuple(map(beside_another, alone.decode)),
    )


@pytest.fixture
def cluster(config: ClusterConfig, cluster_pool: ClusterPool) -> Iterator[Cluster]:
    """After every test its engines have all their blocks back."""
    cluster = cluster_pool.get(config)
    yield cluster
    wait_all_blocks_free(cluster)


def forget_prefixes(engine: Engine) -> None:
    """What comes again must come from a connector."""
    httpx.post(f"{engine.url}/reset_prefix_cache", timeout=30, **PLAIN_HTTP).raise_for_status()


def loaded_tokens(engine: Engine) -> float:
    """By any of its connectors."""
    return engine.metric("vllm:external_prefix_cache_hits_total")


def ask(engine: Engine, cluster: Cluster, prompt: list[int], **fields: object) -> tuple[int, ...]:
    """A request that never sees the proxy."""
    with Client(engine.url, model=str(cluster.model)) as client:
        completion = client.complete(prompt, **fields)
    assert completion.kv_transfer_params is None, "ours had a part in it"
    return completion.token_ids


def test_ours_pushes(client: Client, reference: Reference) -> None:
    prompts = {tokens: random_prompt(tokens, "ours") for tokens in (2, 127, 128, 129, 500, 1000)}
    completions = {n: client.complete(prompt) for n, prompt in prompts.items()}
    assert {n: c.token_ids for n, c in completions.items()} == {n: reference.complete(p) for n, p in prompts.items()}
    received = {n: c.kv_transfer_params["received_bytes"] for n, c in completions.items() if c.kv_transfer_params}
    assert received == {n: -(-n // BLOCK) * BLOCK * TINY.kv_bytes_per_token for n in prompts}


def test_requests_for_the_other(cluster: Cluster, reference: Reference) -> None:
    for engine in (*cluster.prefill, *cluster.decode):
        prompt = random_prompt(PROMPT, engine.name)
        first = ask(engine, cluster, prompt)
        forget_prefixes(engine)
        before = loaded_tokens(engine)
        again = ask(engine, cluster, prompt)
        assert [first, again] == 2 * [reference.complete(prompt)]
        assert loaded_tokens(engine) - before == RESTORED


def test_the_other_keeps_what_ours_received(cluster: Cluster, client: Client, reference: Reference) -> None:
    """A prompt comes again when both have it: the first in the list brings it."""
    [decode] = cluster.decode
    prompt = random_prompt(PROMPT, "kept")
    assert client.complete(prompt).token_ids == reference.complete(prompt)
    forget_prefixes(decode)
    again = client.complete(prompt)
    assert again.token_ids == reference.complete(prompt)
    assert (again.kv_transfer_params is not None) == decode.config.ours_first
    forget_prefixes(decode)
    before = loaded_tokens(decode)
    assert ask(decode, cluster, prompt) == reference.complete(prompt)
    assert loaded_tokens(decode) - before == RESTORED


def test_ours_pushes_what_the_other_restored(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Prefill's blocks hold it only once the other has put it there, in the step that pushes it."""
    [prefill] = cluster.prefill
    prompt = random_prompt(PROMPT, "restored")
    assert ask(prefill, cluster, prompt) == reference.complete(prompt)
    forget_prefixes(prefill)
    before = loaded_tokens(prefill)
    completion = client.complete(prompt)
    assert loaded_tokens(prefill) - before == RESTORED
    assert completion.token_ids == reference.complete(prompt)
    assert completion.kv_transfer_params is not None
    assert completion.kv_transfer_params["received_bytes"] == RECEIVED


def test_the_other_fails_to_load_a_block(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Each block of the prompt that it restores. Ours must not have pushed what was never loaded."""
    [prefill] = cluster.prefill
    failing = Path(str(dict(prefill.config.beside)["shared_storage_path"]), "failing")
    try:
        for number in range(3):
            prompt = random_prompt(500, f"fails-{number}")
            assert ask(prefill, cluster, prompt) == reference.complete(prompt)
            failing.write_text(str(number))
            forget_prefixes(prefill)
            if prefill.config.load_failure_policy == "fail":
                with pytest.raises(httpx.HTTPStatusError, match="502"):
                    client.complete(prompt)
            else:
                completion = client.complete(prompt)
                assert completion.token_ids == reference.complete(prompt)
                assert completion.kv_transfer_params is not None
            failing.unlink()
    finally:
        failing.unlink(missing_ok=True)


def test_a_request_that_ours_cannot_deliver_fails_alone(client: Client, reference: Reference) -> None:
    assert poisoned_fails_alone(client, reference, [300, 129, POISONED_TOKENS, 5]).status_code == 503
