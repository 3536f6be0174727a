# SPDX-License-Identifier: Apache-2.0
"""The right answers: a single vLLM instance's, asked once per prompt.

Only answers that no order of additions can change count: where two tokens are nearly equally likely, or where the
model repeats itself, another variant of the prompt takes its place.
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from harness.plain_http import PLAIN_HTTP
from harness.soak.workload import OUTPUT_TOKENS, Workload, pool_size

CLEAR = 0.002
"""The chosen token's log probability is so much above the next one's at least. Tensor-parallel sizes and batches
change it by less than a tenth of that in float32."""
DIFFERENT = OUTPUT_TOKENS // 2
"""So many tokens of an answer differ from each other."""
VARIANTS = 20
CONCURRENCY = 16
ANSWER_SECONDS = 120


class Answer(NamedTuple):
    """`tokens`: `OUTPUT_TOKENS` of them. Who asks for fewer gets the first ones."""

    prompt: list[int]
    tokens: tuple[int, ...]


async def ask_for_answers(url: str, model: str, workload: Workload, requests: int) -> list[Answer]:
    """Asks the single instance at `url` for the answers to all prompts of so many requests."""
    at_once = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, **PLAIN_HTTP) as http:

        async def ask(index: int) -> Answer:
            async with at_once:
                return await _clear_answer(http, model, workload, index)

        return await asyncio.gather(*map(ask, range(pool_size(requests))))


async def _clear_answer(http: httpx.AsyncClient, model: str, workload: Workload, index: int) -> Answer:
    for variant in range(VARIANTS):
        prompt = workload.prompt(index, variant)
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 2,
        }
        response = (await http.post("/v1/completions", json=body)).raise_for_status()
        choice = response.json()["choices"][0]
        tokens = tuple(choice["token_ids"])
        if margin(choice["logprobs"]["top_logprobs"]) >= CLEAR and len(set(tokens)) >= DIFFERENT:
            return Answer(prompt, tokens)
    raise RuntimeError(f"none of {VARIANTS} variants of prompt {index} has a clear answer")


def margin(top_logprobs: list[Mapping[str, float]]) -> float:
    """Returns by how much the likeliest token is ahead of the second, at the place where that is least."""
    best_two = (sorted(candidates.values(), reverse=True)[:2] for candidates in top_logprobs)
    return min(first - second for first, second in best_two)
