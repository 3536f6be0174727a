# SPDX-License-Identifier: Apache-2.0
"""Which engine serves a request: strategies behind one interface, chosen by name. They see figures, and do no I/O."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from vllm_ascend_pd.proxy.routing.prompts import PromptEstimate

MAX_CACHED_KEYS = 32 * 1024
"""Prefix blocks remembered per engine: about 4 Mi tokens, more than an engine's cache holds; 5 MB of memory."""


class EngineLoad(NamedTuple):
    """What an engine has to do, as well as it is known."""

    url: str
    requests: int = 0
    """Running and waiting."""
    tokens: int = 0
    """Prefill: prompt tokens not yet computed. Decode: tokens whose KV it holds, or will."""
    capacity: int | None = None
    """Tokens whose KV fits; None: unknown."""


Costs = Callable[[PromptEstimate, Sequence[EngineLoad], Sequence[int]], list[float]]
"""What it costs to give a prompt to each of some engines, if so many of its tokens are new to each: lower is better."""


def prefill_costs(_: PromptEstimate, engines: Sequence[EngineLoad], new: Sequence[int]) -> list[float]:
    """Tokens that are computed until the prompt's KV is there: an engine computes one prompt after the other."""
    return [float(engine.tokens + tokens) for engine, tokens in zip(engines, new, strict=True)]


def decode_costs(prompt: PromptEstimate, engines: Sequence[EngineLoad], new: Sequence[int]) -> list[float]:
    """A step of decode takes longer with each request in it, and with each token of KV that it reads. Which counts how
    much depends on model and machine, so an engine's share of all requests and its share of all KV count the same.
    The KV is that relative to an engine's room if all rooms are known; where it does not fit comes after where it does.
    """
    requests = [float(engine.requests + prompt.sequences) for engine in engines]
    held = [float(engine.tokens + tokens) for engine, tokens in zip(engines, new, strict=True)]
    rooms = [engine.capacity for engine in engines if engine.capacity]
    too_much = [bool(engine.capacity) and kv > (engine.capacity or 0) for engine, kv in zip(engines, held, strict=True)]
    if len(rooms) == len(engines):
        held = [kv / room for kv, room in zip(held, rooms, strict=True)]
    all_requests, all_held = sum(requests) or 1.0, sum(held) or 1.0
    # Shares are at most 1 each, so 2 outweighs both.
    return [
        number / all_requests + kv / all_held + 2.0 * full
        for number, kv, full in zip(requests, held, too_much, strict=True)
    ]


class Strategy(Protocol):
    def order(self, prompt: PromptEstimate, engines: Sequence[EngineLoad]) -> list[str]:
        """The engines' URLs, best first: each exactly once."""

    def sent(self, prompt: PromptEstimate, url: str) -> int:
        """Notes that `prompt` goes to an engine; returns how many of its tokens are new to that."""

    def forget(self, url: str) -> None:
        """An engine is gone, or was restarted: nothing is cached there."""


class RoundRobin:
    """One after the other, whatever they have to do."""

    def __init__(self, costs: Costs = prefill_costs) -> None:
        self._turn = 0

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
    """The engine where it costs least; of equal ones, one after the other."""

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
    """As `LeastLoad`, and tokens that an engine has computed lately cost nothing there. So requests that share a prefix
    stay together as long as that is less work than what waits before them. Where nothing is known and nothing waits,
    the prompt's beginning decides (rendezvous hashing), so that several proxies decide alike."""

    def __init__(self, costs: Costs, max_keys: int = MAX_CACHED_KEYS) -> None:
        super().__init__(costs)
        self._max_keys = max_keys
        self._cached: dict[str, OrderedDict[int, None]] = {}

    def sent(self, prompt: PromptEstimate, url: str) -> int:
        new = self._new_tokens(prompt, url)
        cached = self._cached.setdefault(url, OrderedDict())
        # As engines do, the end of a prompt is given up before its beginning, without which it is of no use.
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
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix-affinity": PrefixAffinity,
}
DEFAULT_STRATEGY = "prefix-affinity"
