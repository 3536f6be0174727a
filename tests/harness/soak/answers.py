# SPDX-License-Identifier: Apache-2.0
"""The right answers: a single vLLM instance's, asked once per prompt and kept in a file.

Only answers that no order of additions can change count: where two tokens are nearly equally likely, or where the
model repeats itself, another variant of the prompt takes its place.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import msgspec

from harness.plain_http import PLAIN_HTTP
from harness.soak.lines import Lines
from harness.soak.tasks import together
from harness.soak.workload import OUTPUT_TOKENS, Workload, pool_size

CLEAR = 0.002
"""The chosen token's log probability is so much above the next one's at least. Tensor-parallel sizes and batches
change it by less than a tenth of that in float32."""
DIFFERENT = OUTPUT_TOKENS // 2
"""So many tokens of an answer differ from each other."""
VARIANTS = 20
CONCURRENCY = 16
ANSWER_SECONDS = 120


class Answer(msgspec.Struct, frozen=True):
    prompt: int
    variant: int
    tokens: tuple[int, ...]


class Answers:
    """The answers in a file, and those that are added to it."""

    def __init__(self, path: Path, workload: Workload) -> None:
        self._workload = workload
        self._file: Lines[Answer] = Lines(path, Answer)
        self._answers = {answer.prompt: answer for answer in self._file.items}

    def missing(self, requests: int) -> list[int]:
        """Returns the prompts of that many requests that have no answer yet."""
        return [index for index in range(pool_size(requests)) if index not in self._answers]

    def prompt(self, index: int) -> list[int]:
        return self._workload.prompt(index, self._answers[index].variant)

    def tokens(self, index: int) -> tuple[int, ...]:
        """`OUTPUT_TOKENS` of them: fewer are the first ones."""
        return self._answers[index].tokens

    async def ask(self, url: str, model: str, requests: int, on_answer: Callable[[], None]) -> None:
        """Asks the single instance at `url` for all missing answers."""
        missing = iter(self.missing(requests))
        timeout = httpx.Timeout(ANSWER_SECONDS)
        async with httpx.AsyncClient(base_url=url, timeout=timeout, **PLAIN_HTTP) as http:

            async def ask_next() -> None:
                for index in missing:
                    answer = await self._clear_answer(http, model, index)
                    self._answers[index] = answer
                    self._file.add(answer)
                    on_answer()

            await together(ask_next() for _ in range(CONCURRENCY))

    async def _clear_answer(self, http: httpx.AsyncClient, model: str, index: int) -> Answer:
        for variant in range(VARIANTS):
            body = {
                "model": model,
                "prompt": self._workload.prompt(index, variant),
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
                return Answer(index, variant, tokens)
        raise RuntimeError(f"none of {VARIANTS} variants of prompt {index} has a clear answer")


def margin(top_logprobs: list[Mapping[str, float]]) -> float:
    """Returns by how much the likeliest token is ahead of the second, at the place where that is least."""
    best_two = (sorted(candidates.values(), reverse=True)[:2] for candidates in top_logprobs)
    return min(first - second for first, second in best_two)
