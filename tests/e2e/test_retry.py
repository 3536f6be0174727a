# SPDX-License-Identifier: Apache-2.0
"""Engines that fail while they serve, with another one beside them: clients get a single engine's tokens all the
same."""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from harness.client import Client, random_prompt
from harness.clusters import FAULTS, Cluster, ClusterConfig
from harness.engines import Engine, EngineConfig, Role, wait_ready
from harness.failures import wait_all_blocks_free
from harness.pool import Reference
from harness.proxy_state import counted, withheld
from harness.waiting import wait_until

# Short, so that a writer that died is not waited for long.
TIMES = (("lease_s", 10.0), ("write_timeout_s", 5.0), ("grant_timeout_s", 20.0))
RANK = 8
"""Of adapters, for `test_adapters.py`."""
ADAPTING = EngineConfig(
    connector_extra=TIMES,
    args=("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"),
    env=(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),),
)
# Small steps: there is time to end an engine between the first push and the last.
PREFILL = dataclasses.replace(ADAPTING, role=Role.PREFILL, max_num_batched_tokens=64)
POISONED = dataclasses.replace(PREFILL, env=(*PREFILL.env, *FAULTS))
DECODE = dataclasses.replace(
    ADAPTING,
    role=Role.DECODE,
    who_computes="auto",
    connector_extra=(*TIMES, ("decode_prompt_tokens", 0)),  # nothing is cheap: it computes what prefill cannot
)
PROBING = ()  # not as patient as others
TWO_OF_EACH = ClusterConfig("two-of-each-one-fails-some", (POISONED, PREFILL), (DECODE, DECODE), PROBING, spans=True)

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("cluster", [TWO_OF_EACH], ids=str, indirect=True)]


def retries(cluster: Cluster) -> dict[str, int]:
    return counted(cluster.url)[0]


def is_pushing(prefill: Engine) -> bool:
    """Has computed part of a prompt, none to its end."""
    return prefill.metric("vllm:num_requests_running") > 0 and prefill.metric("vllm:kv_cache_usage_perc") > 0.02


def ask(pool: ThreadPoolExecutor, client: Client, prompts: list[list[int]]) -> list[Future[tuple[int, ...]]]:
    """Half of them streams."""
    return [
        pool.submit(lambda p=prompt, s=bool(i % 2): client.complete(p, stream=s).token_ids)
        for i, prompt in enumerate(prompts)
    ]


def ask_until_pushing(
    pool: ThreadPoolExecutor, client: Client, prefill: Engine, count: int
) -> tuple[list[list[int]], list[Future[tuple[int, ...]]]]:
    """Prompts and their answers to come, `prefill` being in the middle of some. It may be through before anybody has
    looked: then others are asked for."""
    for _ in range(20):
        prompts = [random_prompt(2000 + i, f"{prefill.url} {time.monotonic()}") for i in range(count)]
        asked = ask(pool, client, prompts)
        while not all(answer.done() for answer in asked):
            if is_pushing(prefill):
                return prompts, asked
            time.sleep(0.01)
    pytest.fail("nothing was prefilled")


def bring_back(engine: Engine, cluster: Cluster, client: Client, reference: Reference) -> None:
    """All engines serve, the proxy knows that, and nothing is left of what failed."""
    if engine.process.exit_code is not None:
        engine.start()
    wait_ready([engine])
    wait_until(lambda: not any(withheld(cluster.url).values()), 60)
    prompts = [random_prompt(200, f"after {time.monotonic()}-{i}") for i in range(4)]
    assert [client.complete(prompt).token_ids for prompt in prompts] == [reference.complete(p) for p in prompts]
    wait_all_blocks_free(cluster)


def test_prefill_killed_while_it_pushes(cluster: Cluster, client: Client, reference: Reference) -> None:
    killed = cluster.prefill[0]
    before = retries(cluster)
    with ThreadPoolExecutor(6) as pool:
        prompts, asked = ask_until_pushing(pool, client, killed, 6)
        killed.process.kill()
        answers = [answer.result() for answer in asked]
    assert answers == [reference.complete(prompt) for prompt in prompts]
    # Made anew, in other blocks: those it was writing to are not waited for.
    assert retries(cluster)["decode"] > before["decode"]
    assert retries(cluster)["prefill"] == before["prefill"]
    bring_back(killed, cluster, client, reference)


def test_decode_killed_before_the_first_token(cluster: Cluster, client: Client, reference: Reference) -> None:
    killed = cluster.decode[0]
    before = retries(cluster)["decode"]
    with ThreadPoolExecutor(6) as pool:
        prompts, asked = ask_until_pushing(pool, client, cluster.prefill[0], 6)
        killed.process.kill()
        answers = [answer.result() for answer in asked]
    assert answers == [reference.complete(prompt) for prompt in prompts]
    assert retries(cluster)["decode"] > before
    bring_back(killed, cluster, client, reference)
