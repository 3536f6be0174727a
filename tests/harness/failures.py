# SPDX-License-Identifier: Apache-2.0
"""Checks of end-to-end failure tests, for every backend."""

import time
from collections.abc import Sequence

import httpx

from harness.agreement import assert_agree
from harness.client import Client, Completion, at_once, random_prompt
from harness.clusters import POISONED_TOKENS, Cluster
from harness.engines import Engine
from harness.pool import Reference

FREE_WITHIN_S = 180.0
"""Longer than a lease and the time a failed write needs to settle."""


def poisoned_fails_alone(
    client: Client, reference: Reference, lengths: Sequence[int], left_to_decode: int = 0
) -> httpx.Response:
    """Sends prompts of these lengths at once, one of them `POISONED_TOKENS` and what is left to decode: its answer,
    which is an error's. All others must be right."""
    prompts = [random_prompt(tokens, "poison") for tokens in lengths]

    def attempt(prompt: list[int]) -> Completion | httpx.Response:
        try:
            return client.complete(prompt)
        except httpx.HTTPStatusError as error:
            return error.response

    answers = at_once(attempt, prompts, concurrency=len(prompts))
    poisoned = lengths.index(POISONED_TOKENS + left_to_decode)
    failed = answers.pop(poisoned)
    del prompts[poisoned]
    assert isinstance(failed, httpx.Response)
    assert_agree(reference, prompts, answers)
    return failed


def wait_all_blocks_free(cluster: Cluster) -> None:
    """Waits until the engines of `cluster` have nothing to do and no block in use. Fails after `FREE_WITHIN_S`."""
    deadline = time.monotonic() + FREE_WITHIN_S
    engines = [*cluster.prefill, *cluster.decode]
    while not all(_all_blocks_are_free(engine) for engine in engines):
        usage = {engine.name: engine.metric("vllm:kv_cache_usage_perc") for engine in engines}
        assert time.monotonic() < deadline, f"blocks in use: {usage}"
        time.sleep(0.2)


def _all_blocks_are_free(engine: Engine) -> bool:
    """Whether no block is in use by vLLM's own count. Cached blocks count as free."""
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(engine.metric(name) == 0 for name in busy)
