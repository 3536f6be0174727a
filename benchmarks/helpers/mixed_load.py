# SPDX-License-Identifier: Apache-2.0
"""Streams that decode while prompts of all lengths arrive, as `who_computes.py` measures them.

One asyncio loop runs all of it, because a thread for each stream would take more of the engines' cores.
"""

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from harness.client import EventData, StreamError, random_prompt

SHORT, LONG = (8, 128), (1000, 4000)
"""Tokens of a prompt, least and most. Short ones are spread evenly over the logarithm, so that 8 to 32 are half."""
SHORT_SHARE = 0.7
TOKENS = 8
"""Generated after each prompt of the load."""
SETTLE_SECONDS = 0.5
"""Between the last stream's first token and the load."""


@dataclass(frozen=True)
class Arrival:
    # Seconds after the load has begun.
    at_s: float
    # Of its prompt.
    tokens: int


def arrivals(seconds: float, rate: float, seed: str) -> list[Arrival]:
    """A Poisson process of `rate` requests/s. The share of short prompts is exact."""
    rng = random.Random(f"arrivals {seed}")
    count = round(rate * seconds)
    shorts = round(count * SHORT_SHARE)
    lengths = [round(math.exp(rng.uniform(*map(math.log, SHORT)))) for _ in range(shorts)]
    lengths += [rng.randint(*LONG) for _ in range(count - shorts)]
    rng.shuffle(lengths)
    times = sorted(rng.uniform(0, seconds) for _ in lengths)  # given their number, that is what a Poisson process does
    return [Arrival(at_s, tokens) for at_s, tokens in zip(times, lengths, strict=True)]


@dataclass
class LoadResult:
    """What one turn of a side came to."""

    # Seconds to the first token, of each arrival in order.
    ttfts: list[float] = field(default_factory=list)
    # Of each arrival, its prompt's tokens.
    lengths: list[int] = field(default_factory=list)
    # Tokens that all streams got while the load ran.
    tokens: int = 0
    # Stream-seconds in which they got them.
    seconds: float = 0.0
    # Seconds between two pieces of a stream.
    gaps: list[float] = field(default_factory=list)

    @property
    def token_seconds(self) -> float:
        """Seconds per output token of a stream."""
        return self.seconds / self.tokens if self.tokens else math.inf


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw()


class MixedLoad:
    """Sends to one side. All lengths and times are the same for each side of a seed, prompts differ between sides.

    url, headers: where to, and what goes with each request.
    model: the served model's name.
    vocabulary: how many tokens the model knows.
    streams: how many decode beside the load.
    stream_tokens: after how many tokens a stream is replaced by another.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], model: str, vocabulary: int, streams: int, stream_tokens: int
    ) -> None:
        self._url, self._headers = f"{url}/v1/completions", headers
        self._model, self._vocabulary = model, vocabulary
        self._streams, self._stream_tokens = streams, stream_tokens

    def run(self, load: Sequence[Arrival], seconds: float, seed: str) -> LoadResult:
        """Returns when each arrival has its tokens. Raises StreamError or aiohttp.ClientError."""
        return asyncio.run(self._run(load, seconds, seed))

    async def _run(self, load: Sequence[Arrival], seconds: float, seed: str) -> LoadResult:
        result = LoadResult()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=180)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            pieces: list[list[tuple[float, int]]] = [[] for _ in range(self._streams)]
            tasks = [
                asyncio.create_task(self._stream(session, f"{seed} stream {index}", each))
                for index, each in enumerate(pieces)
            ]
            try:
                while not all(pieces):
                    await asyncio.sleep(0.01)
                    _raise_if_ended(tasks)
                await asyncio.sleep(SETTLE_SECONDS)
                begun = time.perf_counter()
                requests = [
                    self._request(session, begun, each, f"{seed} load {index}") for index, each in enumerate(load)
                ]
                ending = asyncio.create_task(asyncio.sleep(seconds))
                result.ttfts = await asyncio.gather(*requests)
                await ending
                _raise_if_ended(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks)
        result.lengths = [each.tokens for each in load]
        _count(pieces, begun, begun + seconds, result)
        return result

    async def _stream(self, session: aiohttp.ClientSession, seed: str, pieces: list[tuple[float, int]]) -> None:
        number = 0
        while True:
            prompt = random_prompt(SHORT[1], f"{seed} {number}", self._vocabulary)
            await self._ask(session, prompt, self._stream_tokens, lambda n: pieces.append((time.perf_counter(), n)))
            number += 1

    async def _request(self, session: aiohttp.ClientSession, begun: float, arrival: Arrival, seed: str) -> float:
        """Seconds from its arrival to its first token."""
        prompt = random_prompt(arrival.tokens, seed, self._vocabulary)
        await asyncio.sleep(begun + arrival.at_s - time.perf_counter())
        got: list[float] = []
        await self._ask(session, prompt, TOKENS, lambda _: got.append(time.perf_counter()))
        return got[0] - begun - arrival.at_s

    async def _ask(
        self, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int, got: Callable[[int], None]
    ) -> None:
        """`got` is called with each piece's number of tokens."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        async with session.post(self._url, json=body, headers=self._headers) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {await response.text()}")
            events = EventData()
            tokens = 0
            async for chunk in response.content.iter_any():
                for data in events.feed(chunk):
                    if data == "[DONE]":
                        continue
                    event = msgspec.json.decode(data, type=_Event)
                    if bytes(event.error):
                        raise StreamError(bytes(event.error).decode())
                    found = sum(len(choice.token_ids or ()) for choice in event.choices)
                    tokens += found
                    if found:
                        got(found)
            if tokens != max_tokens:
                raise StreamError(f"{tokens} of {max_tokens} tokens")


def _raise_if_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _count(pieces: Sequence[Sequence[tuple[float, int]]], begun: float, ended: float, result: LoadResult) -> None:
    """Counts what streams got while the load ran, from their first piece in that time to their last."""
    for each in pieces:
        inside = [(at, tokens) for at, tokens in each if begun <= at <= ended]
        if len(inside) < 2:
            continue
        result.tokens += sum(tokens for _, tokens in inside[1:])
        result.seconds += inside[-1][0] - inside[0][0]
        result.gaps += [after[0] - before[0] for before, after in itertools.pairwise(inside)]
