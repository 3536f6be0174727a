# SPDX-License-Identifier: Apache-2.0
"""Engines that end while they serve, and come back at the same addresses and under the same configured `engine_id`:
requests of then end, later ones get a single engine's tokens."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from test_scheduling import FEW_BLOCKS

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster
from harness.engines import wait_ready
from harness.failures import wait_all_blocks_free
from harness.pool import Reference, long
from harness.processes import ManagedProcess

pytestmark = [
    pytest.mark.parametrize("cluster", [FEW_BLOCKS], ids=str, indirect=True),
    pytest.mark.timeout(900),
]


def attempt(client: Client, prompt: list[int]) -> tuple[int, ...] | None:
    """The tokens that follow `prompt`, or None for an error."""
    try:
        return client.complete(prompt).token_ids
    except (httpx.HTTPStatusError, httpx.RemoteProtocolError):
        return None


@pytest.mark.parametrize(
    ("side", "end"),
    [("decode", ManagedProcess.kill), long("prefill", ManagedProcess.stop)],
    ids=["decode-killed", "prefill-terminated"],
)
def test_restarted_while_it_serves(
    cluster: Cluster, client: Client, reference: Reference, side: str, end: Callable[[ManagedProcess], None]
) -> None:
    [prefill] = cluster.prefill
    [engine] = cluster.prefill if side == "prefill" else cluster.decode
    prompts = [random_prompt(1000, f"{side}-{i}") for i in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(attempt, client, prompt) for prompt in prompts]
        while prefill.metric("vllm:num_requests_running") == 0:
            time.sleep(0.05)
        end(engine.process)
        answers = [answer.result() for answer in asked]
    assert None in answers
    served = {i: answer for i, answer in enumerate(answers) if answer is not None}
    assert served == {i: reference.complete(prompts[i]) for i in served}

    engine.start()
    wait_ready([engine])
    prompts = [random_prompt(300, f"after {side}-{i}") for i in range(4)]
    answers = at_once(lambda prompt: client.complete(prompt).token_ids, prompts, concurrency=4)
    assert answers == [reference.complete(prompt) for prompt in prompts]
    wait_all_blocks_free(cluster)
