# SPDX-License-Identifier: Apache-2.0
"""Asks one request, and says how it ended."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from harness.client import EventData
from harness.soak.ledger import Finished, Outcome
from harness.soak.workload import Request

HANG_SECONDS = 240.0
"""An answer that takes longer will never come: the connector gives a transfer up before (`run.TIMES`)."""


class Failed(Exception):
    """The proxy or an engine said in the API's own words that the request failed."""


class Load:
    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self._usual_seconds = 1.0
        """A moving average of the time that answers take."""

    async def ask(self, request: Request, prompt: Sequence[int], right: Sequence[int]) -> Finished:
        """`right`: the tokens that follow the prompt, as many as can be asked for."""
        start = time.time()
        tokens: list[int] = []
        outcome, reason = await self._outcome(request, prompt, tokens)
        if tuple(tokens) != tuple(right[: len(tokens)]) or len(tokens) > request.tokens:
            outcome, reason = Outcome.WRONG, f"{tokens}, not {list(right[: request.tokens])}"
        elif outcome is Outcome.RIGHT and len(tokens) < request.tokens:
            outcome, reason = Outcome.WRONG, f"only {len(tokens)} of {request.tokens} tokens"
        end = time.time()
        if outcome is Outcome.RIGHT:
            self._usual_seconds += 0.1 * (end - start - self._usual_seconds)
        return Finished(outcome, start, end, reason)

    async def _outcome(self, request: Request, prompt: Sequence[int], tokens: list[int]) -> tuple[Outcome, str]:
        leave = request.leave
        patience = leave.patience * self._usual_seconds if leave and leave.patience is not None else HANG_SECONDS
        try:
            async with asyncio.timeout(min(patience, HANG_SECONDS)):
                if request.stream:
                    await self._stream(request, prompt, tokens)
                else:
                    await self._whole(request, prompt, tokens)
        except TimeoutError:
            return (Outcome.ABORTED, "") if patience < HANG_SECONDS else (Outcome.HUNG, f"after {HANG_SECONDS:.0f} s")
        except Failed as error:
            return Outcome.FAILED, str(error)
        except (httpx.HTTPError, ValueError) as error:  # ValueError: no JSON
            return Outcome.BROKEN, f"{type(error).__name__}: {error}"
        return (Outcome.RIGHT if len(tokens) >= request.tokens or leave is None else Outcome.ABORTED), ""

    async def _whole(self, request: Request, prompt: Sequence[int], tokens: list[int]) -> None:
        response = await self._http.post("/v1/completions", json=self._body(request, prompt))
        _check(response)
        tokens += response.json()["choices"][0]["token_ids"]

    async def _stream(self, request: Request, prompt: Sequence[int], tokens: list[int]) -> None:
        async with self._http.stream("POST", "/v1/completions", json=self._body(request, prompt)) as response:
            if response.is_error:
                await response.aread()
            _check(response)
            events = EventData()
            async for data in (data async for chunk in response.aiter_bytes() for data in events.feed(chunk)):
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise Failed(_message(event))
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                if request.leave and request.leave.tokens and len(tokens) >= request.leave.tokens:
                    return
        raise httpx.RemoteProtocolError("the stream ended without [DONE]")

    def _body(self, request: Request, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": request.stream,
        }


def _check(response: httpx.Response) -> None:
    """Raises Failed for an API error, ValueError for one that is not in the API's words."""
    if response.is_error:
        raise Failed(f"HTTP {response.status_code}: {_message(response.json())}")


def _message(body: Any) -> str:
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        raise ValueError(f"no API error: {body}") from None
