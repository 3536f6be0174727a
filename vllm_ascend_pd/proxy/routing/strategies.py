# SPDX-License-Identifier: Apache-2.0
"""Routing: what a prompt costs at each engine, and which one gets it. No I/O.

Prompts are estimated before they are tokenised: their length, and keys of their prefixes.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from vllm_ascend_pd.proxy.http.bodies import ClientRequest, Fields, begins_with
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.routing.load import EngineLoad

_BYTES_PER_TOKEN = 4
"""Typical of English text and code in most tokenisers. The error is the same for all engines."""
_BYTES_PER_KEY = 512
"""About 128 tokens, which is vllm-ascend's block size. Engines cache whole blocks only."""
_MAX_KEYS = 1024
"""Limit per prompt, about 128 Ki tokens. Hashing them takes 2 ms."""
_DATA_URL = re.compile(rb'"data:[^"]*')
_MAX_IMAGES = 4096
"""Looked for in a prompt. What follows counts as text."""
_LOOKED_AT = 2 * 1024 * 1024
"""Bytes of all prompts of a request that are looked at for an estimate: more than most have. It takes 3 ms."""
_LEAST_LOOKED_AT = 4096
"""Bytes of each prompt."""
_SEED_BYTES = 64 * 1024
"""Of each field of `_SEED_FIELDS` that prompts must have in common."""
_TOKENS_PER_IMAGE = 1024
"""Tokens per image or sound in a chat, whatever its size: the order of magnitude of vision models."""
_EMBEDDING_BYTES_PER_TOKEN = 8192
"""Bytes of `prompt_embeds` per token: 3,072 elements of two bytes in base64, as a typical hidden size."""
# Fields that take part in an engine's prefix cache keys: prompts that differ in one of them share no block.
_SEED_FIELDS = (
    *("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs", "mm_processor_kwargs"),
    *("instructions", "system"),
)
_FIELDS_OF_PROMPT = ("tools", "instructions", "system")
"""Fields whose text is part of the prompt, beside the field with the conversation."""
MAX_CACHED_KEYS = 32 * 1024
"""Prefix blocks remembered per engine. They cover about 4 Mi tokens, more than an engine's cache holds, in 5 MB."""


class PromptEstimate(NamedTuple):
    """What routing uses of a prompt, or of all prompts of a request together."""

    tokens: int
    """Estimated length."""
    keys: tuple[int, ...] = ()
    """Key `i` identifies the first `i + 1` blocks. A prompt shorter than a block has no keys."""
    tokens_per_key: float = 0.0
    """Estimated tokens per block."""
    sequences: int = 1
    """How many sequences decode generates from it."""

    def new_tokens(self, known_keys: int) -> int:
        """How many tokens an engine computes if it has the first `known_keys` blocks."""
        return max(0, self.tokens - round(known_keys * self.tokens_per_key))


NO_PROMPT = PromptEstimate(0, sequences=0)
"""For requests for which an engine computes nothing."""
UNREAD_PROMPT = PromptEstimate(0)
"""For requests whose prompts only decode reads."""


def prompt_of(request: ClientRequest, index: int) -> PromptEstimate:
    """Estimates prompt number `index` as a prefill engine gets it."""
    text = request.prompts[index].text
    tokens = _tokens_of(request, index)
    keys = _keys(_seed(request.fields), text)
    return PromptEstimate(tokens, keys, tokens * _BYTES_PER_KEY / len(text) if keys else 0.0)


def prompts_of(request: ClientRequest) -> PromptEstimate:
    """Estimates all prompts of a request together, as a decode engine gets them. The keys are the first one's."""
    if not request.prompts:
        return NO_PROMPT
    others = sum(_tokens_of(request, index) for index in range(1, len(request.prompts)))
    first = prompt_of(request, 0)
    return first._replace(tokens=first.tokens + others, sequences=len(request.prompts) * request.samples)


def _tokens_of(request: ClientRequest, index: int) -> int:
    """A prompt's estimated number of tokens, by its first part if it is large."""
    prompt, whole = request.prompts[index], len(request.prompts[index].text)
    if request.endpoint is Endpoint.COMPLETIONS and not begins_with(prompt.text, b"["):
        per_token = _BYTES_PER_TOKEN if prompt.field == "prompt" else _EMBEDDING_BYTES_PER_TOKEN
        return max(1, whole // per_token)
    text = prompt.text[: max(_LEAST_LOOKED_AT, _LOOKED_AT // len(request.prompts))]
    scale = whole / len(text) if text else 1.0
    if request.endpoint in (Endpoint.COMPLETIONS, Endpoint.GENERATE):
        return round((bytes(text).count(b",") + 1) * scale)
    others = sum(len(request.fields.get(name, b"")) for name in _FIELDS_OF_PROMPT)
    return max(1, round(_text_tokens(text) * scale) + others // _BYTES_PER_TOKEN)


def _text_tokens(text: memoryview) -> int:
    """Estimates the tokens of JSON text. Each data URL counts as one image."""
    images, letters = 0, len(text)
    for url in islice(_DATA_URL.finditer(text), _MAX_IMAGES):
        images, letters = images + 1, letters - (url.end() - url.start())
    return letters // _BYTES_PER_TOKEN + images * _TOKENS_PER_IMAGE


def _seed(fields: Fields) -> bytes:
    seed = hashlib.blake2b(digest_size=8)
    for name in _SEED_FIELDS:
        value = fields.get(name, b"")
        seed.update(b"%d:" % len(value))
        seed.update(value[:_SEED_BYTES])
    return seed.digest()


def _keys(seed: bytes, text: memoryview) -> tuple[int, ...]:
    """Returns one key per whole block. Each covers all blocks before it, and is the same in every proxy."""
    digest, keys = seed, []
    whole = min(len(text), _MAX_KEYS * _BYTES_PER_KEY) // _BYTES_PER_KEY * _BYTES_PER_KEY
    for start in range(0, whole, _BYTES_PER_KEY):
        digest = hashlib.blake2b(digest + bytes(text[start : start + _BYTES_PER_KEY]), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little"))
    return tuple(keys)


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


class PrefixAffinity:
    """Prefers the engine with the lowest cost. Tokens that an engine has computed lately cost nothing there.

    Requests with a common prefix so go to the same engine, unless the work that waits there costs more than computing
    the prefix elsewhere. Engines with equal costs are ordered by rendezvous hashing of the prompt's first block, so
    that several proxies choose the same. For a prompt shorter than a block they are used in turn.
    """

    def __init__(self, costs: Costs, max_keys: int = MAX_CACHED_KEYS) -> None:
        self._costs = costs
        self._max_keys = max_keys
        self._turn = 0
        """Number of rankings so far."""
        self._cached: dict[str, OrderedDict[int, int]] = {}
        """Keys of the prefix blocks that an engine computes or has computed, by its URL; least recently used first.
        The value is 0 once it has taken a prompt with the block. Until then it is how many such prompts are there."""

    def order(self, prompt: PromptEstimate, engines: Sequence[EngineLoad]) -> list[str]:
        """Returns the URL of each engine once, best first."""
        first = self._turn % len(engines) if engines else 0
        self._turn += 1
        turns = [*engines[first:], *engines[:first]]
        costs = self._costs(prompt, turns, [self._new_tokens(prompt, engine.url) for engine in turns])
        ties = [_rendezvous(prompt.keys[0], engine.url) for engine in turns] if prompt.keys else range(len(turns))
        ranked = sorted(zip(costs, ties, turns, strict=True), key=itemgetter(0, 1))
        return [engine.url for _, _, engine in ranked]

    def sent(self, prompt: PromptEstimate, url: str) -> int:
        """Notes that a prompt goes to an engine. Returns how many of its tokens that engine has not cached.

        Call `ended` when the prompt is there no longer.
        """
        new = self._new_tokens(prompt, url)
        cached = self._cached.setdefault(url, OrderedDict())
        # Later blocks are forgotten before earlier ones, as in engines: without its beginning a prefix is useless.
        for key in reversed(prompt.keys[: self._max_keys]):
            there = cached.get(key)
            cached[key] = 0 if there == 0 else (there or 0) + 1
            cached.move_to_end(key)
        while len(cached) > self._max_keys:
            cached.popitem(last=False)
        return new

    def ended(self, prompt: PromptEstimate, url: str, is_taken: bool) -> None:
        """Notes that a prompt that was sent to an engine has ended. `is_taken`: whether the engine had taken it."""
        cached = self._cached.get(url, OrderedDict())
        for key in prompt.keys[: self._max_keys]:
            there = cached.get(key)
            if is_taken and there is not None:
                cached[key] = 0
            elif there == 1:
                del cached[key]
            elif there:
                cached[key] = there - 1

    def forget(self, url: str) -> None:
        """Notes that an engine is gone or was restarted, so nothing is cached there."""
        self._cached.pop(url, None)

    def _new_tokens(self, prompt: PromptEstimate, url: str) -> int:
        cached = self._cached.get(url, ())
        known = next((index for index, key in enumerate(prompt.keys) if key not in cached), len(prompt.keys))
        return prompt.new_tokens(known)


def _rendezvous(key: int, url: str) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d " % key + url.encode(), digest_size=8).digest(), "little")
