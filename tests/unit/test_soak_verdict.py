# SPDX-License-Identifier: Apache-2.0
"""The long run's own judgement: what it asks, what it takes for right, and when it passes."""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from harness.soak.answers import margin
from harness.soak.ledger import Back, Drained, Finished, Killed, Ledger, Outcome, Record, Started, Summary, summarize
from harness.soak.lines import Lines
from harness.soak.load import Load
from harness.soak.run import Folder, FolderError, Settings, Signal
from harness.soak.samples import Growth, Sample, append, growth, read, total_retries
from harness.soak.tasks import together
from harness.soak.workload import MAX_MODEL_LEN, OUTPUT_TOKENS, Leave, Request, Workload, pool_size

RIGHT = tuple(range(100, 100 + OUTPUT_TOKENS))
WHOLE = Request(number=7, prompt=0, tokens=5, stream=False, leave=None)
STREAM = dataclasses.replace(WHOLE, stream=True)


# --- what is asked -----------------------------------------------------------------------------------------


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    assert list(Workload(3).requests(200)) == list(Workload(3).requests(500))[:200]
    assert list(Workload(3).requests(50)) != list(Workload(4).requests(50))


def test_requests_are_mixed() -> None:
    workload = Workload(0)
    requests = list(workload.requests(5000))
    leaving = [request.leave for request in requests if request.leave]
    assert 550 < len(leaving) < 750
    assert {leave.tokens is None for leave in leaving} == {True, False}
    assert {request.tokens for request in requests} == set(range(1, OUTPUT_TOKENS + 1))
    assert all(request.prompt < pool_size(request.number) for request in requests)
    assert 0.4 < sum(request.stream for request in requests) / len(requests) < 0.6


def test_prompts_are_mostly_short_with_a_long_tail_and_shared_beginnings() -> None:
    workload = Workload(0)
    prompts = [workload.prompt(index, 0) for index in range(pool_size(5000))]
    lengths = sorted(map(len, prompts))
    assert lengths[len(lengths) // 2] < 200
    assert lengths[-1] == 2000 <= MAX_MODEL_LEN - OUTPUT_TOKENS
    beginnings = Counter(tuple(prompt[:70]) for prompt in prompts if len(prompt) > 70)
    assert max(beginnings.values()) > 10
    assert workload.prompt(5, 0) != workload.prompt(5, 1)


def test_margin_is_that_of_the_least_certain_token() -> None:
    assert margin([{"a": -0.5, "b": -2.0}, {"a": -1.0, "b": -0.75}]) == 0.25


async def _wait(ended: list[str]) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        ended.append("waiting")


async def _fail() -> None:
    raise FolderError("failing")


def test_the_first_error_is_raised_and_nothing_goes_on() -> None:
    ended: list[str] = []
    with pytest.raises(FolderError, match="failing"):
        asyncio.run(together([_wait(ended), _fail()]))
    assert ended == ["waiting"]


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


def test_interrupted_in_the_restart(tmp_path: Path) -> None:
    """It is no restart; what failed in it is explained all the same."""
    interrupted = [Started(0), finished(0), Killed(100, "prefill-tp2", "KILL"), finished(1, Outcome.FAILED, at=120)]
    assert summary_of(tmp_path, *interrupted).unexplained == 0
    resumed = summary_of(tmp_path, Started(500), finished(2, Outcome.FAILED, at=510))
    assert (resumed.restarts, resumed.unexplained) == (0, 1)
    assert resumed.requests_per_second == 3 / 122  # the pause does not count


def test_a_record_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Ledger(path).add(finished(0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    ledger = Ledger(path)
    ledger.add(finished(1))
    assert Lines[Record](path, Record).items == [finished(0), finished(1)]


def test_a_folder_is_resumed_with_the_same_settings_only(tmp_path: Path) -> None:
    settings = Settings(seed=1, concurrency=8, signal=Signal.KILL, sample_seconds=1.0)
    Folder(tmp_path / "run").prepare(settings)
    Folder(tmp_path / "run").prepare(settings)
    with pytest.raises(FolderError, match="seed 1, not 2"):
        Folder(tmp_path / "run").prepare(Settings(seed=2, concurrency=8, signal=Signal.KILL, sample_seconds=1.0))
    with pytest.raises(FolderError, match="neither empty nor a run"):
        Folder(tmp_path).prepare(settings)


# --- samples -----------------------------------------------------------------------------------------------


def sample(
    at: int, pid: int = 1, server: str = "decode-tp1", blocks: int | None = 5, retries: int | None = None
) -> Sample:
    return Sample(at, server, pid, 3, (1000 + at) << 20, 50 + at // 10, 40, blocks, None, retries, at)


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    samples = [sample(at) for at in range(3)]
    append(path, samples[:1])
    append(path, samples[1:])
    assert read(path) == samples
    with path.open("a") as file:
        file.write("4,decode-tp")
    assert read(path) == samples


def test_growth_is_that_of_the_longest_life() -> None:
    lives = [*(sample(at) for at in range(20)), *(sample(at, pid=2) for at in range(20, 70))]
    starting = [sample(at, pid=2, blocks=None) for at in range(20)]
    assert growth(starting) == {}
    assert growth(starting + lives) == growth(lives)
    assert growth(lives) == {"decode-tp1": Growth(resident_mib=45, threads=4, files=0)}


def test_retries_of_all_proxies_are_added() -> None:
    samples = [
        sample(at, pid, "proxy", None, retries) for at, pid, retries in ((0, 1, 0), (1, 1, 3), (2, 2, 0), (3, 2, 2))
    ]
    assert total_retries([*samples, sample(4)]) == 5
