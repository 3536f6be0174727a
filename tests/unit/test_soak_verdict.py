# SPDX-License-Identifier: Apache-2.0
"""The long run's own judgement: what it takes for right, and when it passes."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from harness.soak.ledger import Back, Drained, Finished, Killed, Ledger, Outcome, Record, Started, Summary, summarize
from harness.soak.load import Load
from harness.soak.workload import OUTPUT_TOKENS, Leave, Request

RIGHT = tuple(range(100, 100 + OUTPUT_TOKENS))
WHOLE = Request(number=7, prompt=0, tokens=5, stream=False, leave=None)
STREAM = dataclasses.replace(WHOLE, stream=True)


# --- one request -------------------------------------------------------------------------------------------


async def _event_stream(tokens: tuple[int, ...], end: str) -> AsyncIterator[str]:
    for token in tokens:
        yield f"data: {json.dumps({'choices': [{'token_ids': [token]}]})}\n\n"
    yield end


def answer(tokens: tuple[int, ...], stream: bool) -> Response:
    if stream:
        return StreamingResponse(_event_stream(tokens, "data: [DONE]\n\n"))
    return JSONResponse({"choices": [{"token_ids": list(tokens)}]})


def asked(request: Request, response: Response | None) -> Finished:
    """How `request` ends if it is answered so; None: never."""

    async def complete(_: HttpRequest) -> Response:
        if response is None:
            await asyncio.sleep(3600)
        return response

    async def ask() -> Finished:
        app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            return await Load(http, "model").ask(request, [1, 2, 3], RIGHT)

    return asyncio.run(ask())


@pytest.mark.parametrize("request_", [WHOLE, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("tokens", "outcome"),
    [
        (RIGHT[:5], Outcome.RIGHT),
        (RIGHT[:4], Outcome.WRONG),
        ((), Outcome.WRONG),
        (RIGHT[:6], Outcome.WRONG),
        ((*RIGHT[:4], 7), Outcome.WRONG),
    ],
    ids=["right", "short", "empty", "too-long", "one-wrong"],
)
def test_an_answer_is_compared(request_: Request, tokens: tuple[int, ...], outcome: Outcome) -> None:
    assert asked(request_, answer(tokens, request_.stream)).outcome is outcome


ERROR = {"error": {"message": "prefill failed: no route", "code": 502}}


@pytest.mark.parametrize(
    ("request_", "response", "outcome"),
    [
        (WHOLE, JSONResponse(ERROR, 502), Outcome.FAILED),
        (STREAM, JSONResponse(ERROR, 502), Outcome.FAILED),
        (STREAM, StreamingResponse(_event_stream(RIGHT[:2], f"data: {json.dumps(ERROR)}\n\n")), Outcome.FAILED),
        (STREAM, StreamingResponse(_event_stream((7,), f"data: {json.dumps(ERROR)}\n\n")), Outcome.WRONG),
        (STREAM, StreamingResponse(_event_stream(RIGHT[:5], "")), Outcome.BROKEN),
        (WHOLE, JSONResponse({"detail": "?"}, 500), Outcome.BROKEN),
        (WHOLE, Response("<html>", 502), Outcome.BROKEN),
    ],
    ids=["error", "stream-error", "error-event", "error-after-wrong", "stream-ends", "foreign-error", "no-json"],
)
def test_an_end_without_an_answer(request_: Request, response: Response, outcome: Outcome) -> None:
    finished = asked(request_, response)
    assert finished.outcome is outcome
    assert finished.reason


def test_who_leaves_has_got_the_right_tokens_so_far() -> None:
    leaving = dataclasses.replace(STREAM, tokens=OUTPUT_TOKENS, leave=Leave(tokens=3))
    assert asked(leaving, answer(RIGHT, True)).outcome is Outcome.ABORTED
    assert asked(leaving, answer((RIGHT[0], 7, RIGHT[2]), True)).outcome is Outcome.WRONG
    impatient = dataclasses.replace(leaving, leave=Leave(patience=0.05))
    assert asked(impatient, None).outcome is Outcome.ABORTED


def test_no_answer_at_all_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.soak.load.HANG_SECONDS", 0.1)
    assert asked(WHOLE, None).outcome is Outcome.HUNG


# --- the whole run -----------------------------------------------------------------------------------------


def finished(number: int, outcome: Outcome = Outcome.RIGHT, at: float = 0, seconds: float = 1) -> Finished:
    return Finished(number, outcome, at, at + seconds, "HTTP 502: ticket 0123456789abcdef: no answer")


RESTART = (Killed(100, "prefill-tp2", "KILL"), Back(150))


def summary_of(tmp_path: Path, *records: Record, requests: int = 4) -> Summary:
    ledger = Ledger(tmp_path / "results.jsonl")
    for record in records:
        ledger.add(record)
    return summarize(Ledger(tmp_path / "results.jsonl"), requests, 0, {})  # as it is in the file


def test_passes(tmp_path: Path) -> None:
    requests = [finished(0), finished(1, Outcome.ABORTED), finished(2, Outcome.FAILED, at=99.5), finished(3, at=160)]
    summary = summary_of(tmp_path, Started(0), *requests[:2], *RESTART, *requests[2:], Drained(170, 0))
    assert summary.passed
    assert summary.reasons == {"failed: HTTP 502: ticket ...: no answer": 1}
    assert "2 right, 1 aborted, 1 failed" in summary.line
    assert summary.requests_per_second == 4 / 161


@pytest.mark.parametrize(
    ("last", "drained"),
    [
        (finished(3, Outcome.WRONG, at=120), Drained(200, 0)),
        (finished(3, Outcome.HUNG, at=120), Drained(200, 0)),
        (finished(3, Outcome.BROKEN, at=120), Drained(200, 0)),
        (finished(3, Outcome.FAILED, at=98), Drained(200, 0)),
        (finished(3, Outcome.FAILED, at=151), Drained(200, 0)),
        (finished(2), Drained(200, 0)),
        (finished(3), Drained(200, 1)),
        (finished(3), Started(200)),
    ],
    ids=["wrong", "hung", "broken", "failed-before", "failed-after", "one-missing", "leaked", "not-at-the-end"],
)
def test_does_not_pass(tmp_path: Path, last: Record, drained: Record) -> None:
    before = [Started(0), *(finished(number) for number in range(3)), *RESTART]
    assert not summary_of(tmp_path, *before, last, drained).passed


def test_does_not_pass_without_a_restart(tmp_path: Path) -> None:
    assert not summary_of(tmp_path, Started(0), *map(finished, range(4)), Drained(9, 0)).passed
