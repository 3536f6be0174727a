# SPDX-License-Identifier: Apache-2.0
"""OpenAI requests to an engine or a proxy, with the generated token ids in the answers."""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from harness.models import FIRST_TEXT_TOKEN, TINY
from harness.plain_http import PLAIN_HTTP

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = httpx.Timeout(300, connect=5)
"""Longer than engines with `PATIENT` settings may take to say what is wrong."""

Prompt = Sequence[int] | str
Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One choice of an answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    kv_transfer_params: dict[str, Any] | None = None
    """What the decode engine says about the transfer; not in streams."""
    arrivals: tuple[float, ...] = ()
    """Streams only: seconds from the request to each piece that carried tokens."""
    logprobs: tuple[dict[int, float], ...] = ()
    """For each token, where the client asks for it: log probabilities of the likeliest ones, by token id."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token of a stream."""
        return self.arrivals[0]


class Client:
    """Greedy requests that always run to `max_tokens`, so that outputs can be compared token by token.

    `logprobs`: how many of the likeliest tokens answers list at each place. `headers`: of every request.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        timeout: httpx.Timeout = TIMEOUT,
        logprobs: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # A server closes a connection that was idle for 5 s: none is used that is just being closed.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=timeout, limits=limits, **PLAIN_HTTP)
        self._model = model
        self._logprobs: dict[str, Any] = {}
        self._logprobs_of_chats: dict[str, Any] = {}
        if logprobs:
            self._logprobs = {"logprobs": logprobs, "return_tokens_as_token_ids": True}
            self._logprobs_of_chats = self._logprobs | {"logprobs": True, "top_logprobs": logprobs}

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    @property
    def model(self) -> str:
        """The served model's name: asked from `/v1/models` unless given."""
        if self._model is None:
            response = self.http.get("/v1/models")
            response.raise_for_status()
            self._model = response.json()["data"][0]["id"]
        return self._model

    def complete(self, prompt: Prompt, max_tokens: int = 16, *, stream: bool = False, **fields: Any) -> Completion:
        """`/v1/completions` of one prompt with one choice; `fields` are added to the body."""
        body = self._body(max_tokens, self._logprobs | fields) | {"prompt": prompt}
        if stream:
            return self._stream("/v1/completions", body)
        return self._choices("/v1/completions", body)[0]

    def complete_many(
        self, prompts: Sequence[Prompt], max_tokens: int = 16, n: int = 1, **fields: Any
    ) -> list[Completion]:
        """`/v1/completions` of a list of prompts: `n` choices of the first prompt, then of the second, ..."""
        body = self._body(max_tokens, fields) | {"prompt": list(prompts), "n": n}
        if n > 1:  # vLLM refuses temperature 0 here; top_k 1 takes the same tokens
            body |= {"temperature": 1, "top_k": 1}
        return self._choices("/v1/completions", body)

    def chat(self, messages: Messages, max_tokens: int = 16, *, stream: bool = False, **fields: Any) -> Completion:
        """`/v1/chat/completions` with one choice."""
        body = self._body(max_tokens, self._logprobs_of_chats | fields) | {"messages": messages}
        if stream:
            return self._stream("/v1/chat/completions", body)
        return self._choices("/v1/chat/completions", body)[0]

    def shortfall(self, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
        """How far `token_ids`, generated after `prompt`, are from what this engine would choose: the most that a
        token's log probability, given those before it, is below the best one's. 0 for the engine's own choices."""
        response = self.http.post(
            "/v1/completions", json=self._body(1, {"prompt_logprobs": 1}) | {"prompt": [*prompt, *token_ids]}
        )
        _raise_for_status(response)
        after_prompt = response.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
        chosen = [candidates[str(token)]["logprob"] for candidates, token in zip(after_prompt, token_ids, strict=True)]
        best = [max(candidate["logprob"] for candidate in candidates.values()) for candidates in after_prompt]
        return max(b - c for b, c in zip(best, chosen, strict=True))

    def _body(self, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    def _choices(self, path: str, body: dict[str, Any]) -> list[Completion]:
        response = self.http.post(path, json=body)
        _raise_for_status(response)
        answer = response.json()
        return [
            Completion(
                token_ids=tuple(choice["token_ids"]),
                text=_text(choice, "message"),
                finish_reason=choice["finish_reason"],
                kv_transfer_params=answer.get("kv_transfer_params"),
                logprobs=_logprobs(choice),
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def _stream(self, path: str, body: dict[str, Any]) -> Completion:
        start = time.perf_counter()
        token_ids: list[int] = []
        text = ""
        finish_reason = None
        arrivals = []
        logprobs: tuple[dict[int, float], ...] = ()
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.is_error:
                response.read()
            _raise_for_status(response)
            for event in _events(response.iter_bytes()):
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        arrivals.append(time.perf_counter() - start)
                        token_ids += choice["token_ids"]
                        logprobs += _logprobs(choice)
                    text += _text(choice, "delta")
                    finish_reason = choice.get("finish_reason") or finish_reason
        if finish_reason is None:
            raise StreamError("the stream ended without a finish reason")
        return Completion(tuple(token_ids), text, finish_reason, arrivals=tuple(arrivals), logprobs=logprobs)


class StreamError(RuntimeError):
    """A stream carried an error, or ended too early."""


def random_prompt(tokens: int, seed: int | str, vocab_size: int = TINY.vocab_size) -> list[int]:
    """Token ids without special tokens; different lengths of one seed share no prefix."""
    rng = random.Random(f"{tokens} {seed}")
    return [rng.randrange(FIRST_TEXT_TOKEN, vocab_size) for _ in range(tokens)]


def at_once(function: Callable[[T], R], items: Iterable[T], concurrency: int) -> list[R]:
    """`[function(item) for item in items]`, `concurrency` calls at a time; the first error is raised."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(function, items))


class EventData:
    """The data of a stream's server-sent events. Lines end with a line feed alone: httpx's `iter_lines` also splits at
    characters that a JSON string may have, U+2028 say."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Of those that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode().removeprefix("data: ") for line in lines if line.startswith(b"data: ")]


def _events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    events = EventData()
    for data in (data for chunk in chunks for data in events.feed(chunk)):
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise StreamError(json.dumps(event["error"]))
        yield event
    raise StreamError("the stream ended without [DONE]")


def _text(choice: dict[str, Any], part: str) -> str:
    """Of a completion, or of a chat's `message` or `delta`."""
    return (choice["text"] if "text" in choice else choice[part].get("content")) or ""


def _logprobs(choice: dict[str, Any]) -> tuple[dict[int, float], ...]:
    """Of a choice, by token id; empty where they were not asked for."""
    of_choice = choice.get("logprobs") or {}
    if "content" in of_choice:  # a chat
        places = [place["top_logprobs"] for place in of_choice["content"] or []]
        listed = [{each["token"]: each["logprob"] for each in place} for place in places]
    else:
        listed = of_choice.get("top_logprobs") or []
    return tuple({int(name.removeprefix("token_id:")): value for name, value in place.items()} for place in listed)


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.request.url}: HTTP {response.status_code}: {response.text[:2000]}",
            request=response.request,
            response=response,
        )
