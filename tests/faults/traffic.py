# SPDX-License-Identifier: Apache-2.0
"""Requests that are in flight during a fault, and how each of them ended."""

import dataclasses
import enum
import json
import re
import threading
import time
from collections.abc import Sequence

import httpx

from harness.client import Client, StreamError, random_prompt

DEADLINE_S = 150.0
"""A client's patience: a request that has not ended by then hangs. Far above the connector's own deadlines here."""
SHAPES = ((700, 8), (30, 24), (1400, 4), (129, 16), (400, 1), (900, 12), (5, 32), (1900, 2))
"""(prompt tokens, output tokens), in turn."""

VAGUE = re.compile(r"|Internal server error|decode engine: it failed without a reason.*")
"""Errors that name no reason."""


class Outcome(enum.StrEnum):
    RIGHT = "right"
    FAILED = "failed cleanly"
    UNCLEAR = "failed without a reason"
    BROKEN_OFF = "connection broken"
    WRONG = "wrong"
    HUNG = "hung"
    LEFT = "client left"


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request to the proxy."""

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    ask: Ask
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


def asks(name: str, count: int, longest: int) -> list[Ask]:
    """Returns `count` different requests of mixed lengths. Every third is streamed."""
    shapes = [shape for shape in SHAPES if sum(shape) <= longest]
    return [
        Ask(tuple(random_prompt(tokens, f"{name} {i}")), output, stream=i % 3 == 2)
        for i, (tokens, output) in enumerate(shapes[i % len(shapes)] for i in range(count))
    ]


def ask(client: Client, request: Ask, expected: tuple[int, ...], deadline_s: float = DEADLINE_S) -> Answer:
    """Sends a request; never raises."""
    started = time.monotonic()
    outcome, detail = _ask(client, request, expected)
    seconds = time.monotonic() - started
    if seconds > deadline_s:
        outcome = Outcome.HUNG
    return Answer(request, outcome, detail, seconds)


def _ask(client: Client, request: Ask, expected: tuple[int, ...]) -> tuple[Outcome, str]:
    try:
        completion = client.complete(request.prompt, request.max_tokens, stream=request.stream)
    except httpx.HTTPStatusError as error:
        return judge_error(error.response)
    except StreamError as error:
        if "without a finish reason" in str(error):
            return Outcome.UNCLEAR, str(error)  # vLLM leaves out the error of a stream of completions without a token
        if "ended without" in str(error):
            return Outcome.BROKEN_OFF, str(error)
        return _judge_message(json.loads(str(error)).get("message"))
    except httpx.TimeoutException as error:
        return Outcome.HUNG, repr(error)
    except httpx.TransportError as error:
        return Outcome.BROKEN_OFF, repr(error)
    if completion.token_ids != expected:
        return Outcome.WRONG, f"{completion.token_ids} instead of {expected}"
    return Outcome.RIGHT, ""


def judge_error(response: httpx.Response) -> tuple[Outcome, str]:
    """An OpenAI error that names a reason, or not."""
    try:
        return _judge_message(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return Outcome.UNCLEAR, response.text[:500]


def _judge_message(message: object) -> tuple[Outcome, str]:
    clear = isinstance(message, str) and not VAGUE.fullmatch(message.strip())
    return (Outcome.FAILED if clear else Outcome.UNCLEAR), str(message)


class Volley:
    """Requests that are sent at once, each on a thread of its own."""

    def __init__(self, client: Client, requests: Sequence[Ask], expected: Sequence[tuple[int, ...]]) -> None:
        self._answers: list[Answer | None] = [None] * len(requests)
        self._requests = list(requests)
        self._threads = [
            threading.Thread(target=self._send, args=(client, i, request, tokens), daemon=True)
            for i, (request, tokens) in enumerate(zip(requests, expected, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, client: Client, i: int, request: Ask, expected: tuple[int, ...]) -> None:
        self._answers[i] = ask(client, request, expected)

    @property
    def in_flight(self) -> int:
        return sum(answer is None for answer in self._answers)

    def answers(self) -> list[Answer]:
        """Waits until all have ended. A request that takes twice the deadline counts as hung."""
        end = time.monotonic() + 2 * DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [
            answer or Answer(request, Outcome.HUNG, "no end", 2 * DEADLINE_S)
            for answer, request in zip(self._answers, self._requests, strict=True)
        ]
