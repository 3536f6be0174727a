# SPDX-License-Identifier: Apache-2.0
"""The requests of the soak. Each follows from the seed and its number."""

import dataclasses
import random
from collections.abc import Iterator

from harness.client import random_prompt

OUTPUT_TOKENS = 32
"""At most, per request."""
PROMPT_TOKENS = ((1, 200, 60), (201, 600, 28), (601, 1999, 10), (2000, 2000, 2))
"""Shortest, longest, and how many of 100 prompts."""
MAX_MODEL_LEN = 2048
SHARED_PREFIXES = (70, 128, 200, 350, 600, 900)
"""Tokens. Half of the prompts that are longer than the first begin with one of these."""
CACHED_PROMPTS = 32
"""Half of all requests are for one of so many prompts, which therefore stay cached."""
LEAVING = 0.13
"""Clients that mean to leave before the end. Some have their whole answer by then: a tenth of all leaves."""


@dataclasses.dataclass(frozen=True)
class Leave:
    """When the client disconnects: after some tokens, or after this share of the time that a request usually takes."""

    tokens: int | None = None
    patience: float | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    number: int
    prompt: int
    """Which one of the pool."""
    tokens: int
    """To generate."""
    stream: bool
    leave: Leave | None


def pool_size(requests: int) -> int:
    """Returns how many prompts there are for that many requests. The single instance answers each once."""
    return min(1000, 64 + requests // 5)


@dataclasses.dataclass(frozen=True)
class Workload:
    seed: int

    def prompt(self, index: int, variant: int) -> list[int]:
        """Token ids. Variants of a prompt are as likely to share a prefix with another one, and of other content."""
        rng = random.Random(f"{self.seed} prompt {index} {variant}")
        [(shortest, longest, _)] = rng.choices(PROMPT_TOKENS, [share for *_, share in PROMPT_TOKENS])
        tokens = rng.randint(shortest, longest)
        shared = [prefix for prefix in SHARED_PREFIXES if prefix < tokens]
        head = []
        if shared and rng.random() < 0.5:
            head = random_prompt(rng.choice(shared), f"{self.seed} shared")
        return head + random_prompt(tokens - len(head), f"{self.seed} {index} {variant}")

    def request(self, number: int) -> Request:
        rng = random.Random(f"{self.seed} request {number}")
        prompt = rng.randrange(rng.choice((CACHED_PROMPTS, pool_size(number))))
        stream = rng.random() < 0.5
        if rng.random() >= LEAVING:
            return Request(number, prompt, rng.randint(1, OUTPUT_TOKENS), stream, None)
        # Whole answers have no tokens to count, and most moments are not between two tokens.
        if stream and rng.random() < 0.4:
            return Request(number, prompt, OUTPUT_TOKENS, True, Leave(tokens=rng.randrange(1, OUTPUT_TOKENS)))
        return Request(number, prompt, OUTPUT_TOKENS, stream, Leave(patience=rng.random()))

    def requests(self, count: int) -> Iterator[Request]:
        return map(self.request, range(count))
