# SPDX-License-Identifier: Apache-2.0
"""Routing strategies: which engine gets a prompt. They compute with numbers only and do no I/O."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from vllm_ascend_pd.proxy.routing.prompts import PromptEstimate

MAX_CACHED_KEYS = 32 * 1024
"""Prefix blocks remembered per engine. They cover about 4 Mi tokens, more than an engine's cache holds, in 5 MB."""


class EngineLoad(NamedTuple):
    """The estimated load of an engine."""

    url: str
    """The engine's."""
    requests: int = 0
    """Requests running and waiting there."""
    tokens: int = 0
    """Prefill: prompt tokens not yet computed. Decode: tokens whose KV the engine holds or will hold."""
    capacity: int | None = None
    """How many tokens of KV fit. None: unknown."""


Costs = Callable[[PromptEstimate, Sequence[EngineLoad], Sequence[int]], list[float]]
"""Returns the cost of giving a prompt to each engine; lower is better.

Arguments: the prompt, the engines, and for each engine how many of the prompt's tokens it has not cached."""


def prefill_costs(_: PromptEstimate, engines: Sequence[EngineLoad], new: Sequence[int]) -> list[float]:
    """The tokens that each engine computes before the prompt's KV is complete. Engines compute prompts one by one."""
    return [float(engine.tokens + tokens) for engine, tokens in zip(engines, new, strict=True)]


def decode_costs(prompt: PromptEstimate, engines: Sequence[EngineLoad], new: Sequence[int]) -> list[float]:
    """The sum of each engine's share of all requests and its share of all KV.

    A decode step takes longer with each request in it, and with each token of KV that it reads. How much each counts
    depends on the model and the machine, so both shares weigh the same. If all capacities are known, KV is measured
    relative to the engine's capacity. Engines where the prompt does not fit cost more than all others.
    """
    requests = [float(engine.requests + prompt.sequences) for engine in engines]
    held = [float(engine.tokens + tokens) for engine, tokens in zip(engines, new, strict=True)]
    capacities = [engine.capacity for engine in engines if engine.capacity]
    overflows = [
        bool(engine.capacity) and kv > (engine.capacity or 0) for engine, kv in zip(engines, held, strict=True)
    ]
    if len(capacities) == len(engines):
        held = [kv / capacity for kv, capacity in zip(held, capacities, strict=True)]
    all_requests, all_held = sum(requests) or 1.0, sum(held) or 1.0
    # Each share is at most 1, so 2 outweighs both.
    return [
        number / all_requests + kv / all_held + 2.0 * overflow
        for number, kv, overflow in zip(requests, held, overflows, strict=True)
    ]


class Strategy(Protocol):
    """A way to choose engines."""

    def order(self, prompt: PromptEstimate, engines: Sequence[EngineLoad]) -> list[str]:
        """Returns the URL of each engine once, best first."""

    def sent(self, prompt: PromptEstimate, url: str) -> int:
        """Notes that a prompt goes to an engine. Returns how many of its tokens that engine has not cached."""

    def forget(self, url: str) -> None:
        """Notes that an engine is gone or was restarted, so nothing is cached there."""


class RoundRobin:
    """Uses the engines in turn, whatever their load."""

    def __init__(self) -> None:
        self._turn = 0
        """Number of rankings so far."""

    def order(self, prompt: PromptEstimate, engines: Sequence[EngineLoad]) -> list[str]:
        return [engine.url for engine in self._rotated(engines)]

    def _rotated(self, engines: Sequence[EngineLoad]) -> list[EngineLoad]:
        first = self._turn % len(engines) if engines else 0
        self._turn += 1
        return [*engines[first:], *engines[:first]]

    def sent(self, prompt: PromptEstimate, url: str) -> int:
        return prompt.tokens

    def forget(self, url: str) -> None:
        pass


class LeastLoad(RoundRobin):
    """Prefers the engine with the lowest cost. Engines with equal costs are used in turn."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self._costs = costs

    def order(self, prompt: PromptEstimate, engines: Sequence[EngineLoad]) -> list[str]:
        turns = self._rotated(engines)
        costs = self._costs(prompt, turns, [self._new_tokens(prompt, engine.url) for engine in turns])
        ranked = sorted(zip(costs, self._ties(prompt, turns), turns, strict=True), key=itemgetter(0, 1))
        return [engine.url for _, _, engine in ranked]

    def _new_tokens(self, prompt: PromptEstimate, url: str) -> int:
        return prompt.tokens

    def _ties(self, prompt: PromptEstimate, turns: Sequence[EngineLoad]) -> Sequence[int]:
        return range(len(turns))


class PrefixAffinity(LeastLoad):
    """As `LeastLoad`, but tokens that an engine has computed lately cost nothing there.

    Requests with a common prefix so go to the same engine, unless the work that waits there costs more than computing
    the prefix elsewhere. Engines with equal costs are ordered by rendezvous hashing of the prompt's first block, so
    that several proxies choose the same.
    """

    def __init__(self, costs: Costs, max_keys: int = MAX_CACHED_KEYS) -> None:
        super().__init__(costs)
        self._max_keys = max_keys
        self._cached: dict[str, OrderedDict[int, None]] = {}
        """Keys of the prefix blocks that an engine has computed, by its URL; least recently used first."""

    def sent(self, prompt: PromptEstimate, url: str) -> int:
        new = self._new_tokens(prompt, url)
        cached = self._cached.setdefault(url, OrderedDict())
        # Later blocks are forgotten before earlier ones, as in engines: without its beginning a prefix is useless.
        for key in reversed(prompt.keys[: self._max_keys]):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self._max_keys:
            cached.popitem(last=False)
        return new

    def forget(self, url: str) -> None:
        self._cached.pop(url, None)

    def _new_tokens(self, prompt: PromptEstimate, url: str) -> int:
        cached = self._cached.get(url, ())
        known = next((index for index, key in enumerate(prompt.keys) if key not in cached), len(prompt.keys))
        return prompt.new_tokens(known)

    def _ties(self, prompt: PromptEstimate, turns: Sequence[EngineLoad]) -> Sequence[int]:
        if not prompt.keys:
            return super()._ties(prompt, turns)
        return [_rendezvous(prompt.keys[0], engine.url) for engine in turns]


def _rendezvous(key: int, url: str) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d " % key + url.encode(), digest_size=8).digest(), "little")


STRATEGIES: dict[str, Callable[[Costs], Strategy]] = {
    "round-robin": lambda _: RoundRobin(),
    "least-load": LeastLoad,
    "prefix-affinity": PrefixAffinity,
}
DEFAULT_STRATEGY = "prefix-affinity"
