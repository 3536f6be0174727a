# SPDX-License-Identifier: Apache-2.0
"""Decode's questions about tickets without an answer, and how the answers change deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
import pytest
from engine_standin import Servers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from harness.waiting import wait_until
from vllm_ascend_pd.core.metaserver import WAITING_SUFFIX
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.threads import WrongThreadError
from vllm_ascend_pd.decode import waiting_posts
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.pending_posts import PostOutcome

DEADLINE_S = 0.8
SETTINGS = MetaserverSettings(deadline_s=DEADLINE_S, backoff_base_s=0.01, backoff_max_s=0.02)

Says = Callable[[list[str]], Response]


def all_wait(ticket_ids: list[str]) -> Response:
    return JSONResponse({"waiting": ticket_ids})


class Metaserver:
    """Holds tickets back until `released`, and answers questions as `says` does."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.released = False
        self.questions: list[list[str]] = []
        self.tokens: list[str | None] = []
        self.app = Starlette(
            routes=[
                Route(METASERVER_PATH, self._ticket, methods=["POST"]),
                Route(METASERVER_PATH + WAITING_SUFFIX, self._question, methods=["POST"]),
            ]
        )

    async def _ticket(self, _: Request) -> Response:
        while not self.released:
            await anyio.sleep(0.01)
        return Response()

    async def _question(self, request: Request) -> Response:
        self.questions.append((await request.json())["ticket_ids"])
        self.tokens.append(request.headers.get("authorization"))
        return self.says(self.questions[-1])


@contextmanager
def posted(says: Says, *keys: str, **settings: Any) -> Iterator[tuple[Metaserver, MetaserverClient]]:
    metaserver = Metaserver(says)
    with Servers() as servers:
        url = servers.start(lambda _: metaserver.app) + METASERVER_PATH
        client = MetaserverClient(msgspec.structs.replace(SETTINGS, **settings), own_host="127.0.0.1")
        for key in keys:
            client.post(key, url, {})
        yield metaserver, client
        metaserver.released = True
        client.close()


def outcomes(client: MetaserverClient, count: int) -> list[PostOutcome]:
    got: list[PostOutcome] = []
    wait_until(lambda: got.extend(client.poll()) or len(got) >= count, 20)
    return got


def test_a_ticket_that_waits_gets_its_time_again() -> None:
    with posted(all_wait, "t") as (metaserver, client):
        time.sleep(3 * DEADLINE_S)
        assert client.poll() == []
        metaserver.released = True
        assert outcomes(client, 1) == [PostOutcome("t", ok=True)]
        assert metaserver.questions.count(["t"]) == len(metaserver.questions) > 3


@pytest.mark.parametrize(
    "says",
    [
        lambda _: Response(status_code=404),
        lambda _: Response(status_code=500),
        lambda _: Response(b"\x00\xff"),
        lambda _: JSONResponse({"waiting": [1, 2]}),
        lambda _: JSONResponse({"waiting": []}),
        lambda _: JSONResponse({"waiting": ["another"]}),
        lambda _: Response(b"x" * (1 << 20)),
    ],
    ids=["of-other-make", "broken", "garbage", "other-types", "unknown", "others-only", "endless"],
)
def test_an_answer_that_does_not_name_a_ticket_leaves_its_deadline(says: Says) -> None:
    began = time.monotonic()
    with posted(says, "t") as (metaserver, client):
        [outcome] = outcomes(client, 1)
        assert not outcome.ok
        assert f"did not answer within {DEADLINE_S:g} s" in outcome.reason
        assert DEADLINE_S <= time.monotonic() - began < 4 * DEADLINE_S
        assert metaserver.questions


def test_a_question_that_is_lost_is_asked_again() -> None:
    lost: list[None] = []

    def says(ticket_ids: list[str]) -> Response:
        if not lost:
            lost.append(None)
            return Response(status_code=503)
        return all_wait(ticket_ids)

    with posted(says, "t", deadline_s=2.0) as (metaserver, client):
        wait_until(lambda: len(metaserver.questions) > 5, 20)
        assert client.poll() == []


def test_many_tickets_are_asked_about_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_posts, "MAX_ASKED", 8)
    keys = [f"{number:032x}" for number in range(16)]
    with posted(all_wait, *keys, deadline_s=60.0, ask_every_s=2.0, max_connections=12) as (metaserver, client):
        wait_until(lambda: len(metaserver.questions) >= 2, 60)
        # The last four wait for a connection of decode's own: the metaserver does not know them.
        assert metaserver.questions[:2] == [keys[:8], keys[8:12]]
        assert client.poll() == []


def test_a_ticket_answered_soon_is_not_asked_about() -> None:
    with posted(all_wait, "t", deadline_s=4.0) as (metaserver, client):
        time.sleep(0.3)
        metaserver.released = True
        assert outcomes(client, 1) == [PostOutcome("t", ok=True)]
        time.sleep(1.5)
        assert metaserver.questions == []


def test_a_deadline_that_is_prolonged_too_late_is_no_success() -> None:
    """The deadline passes at the moment of the answer."""
    with posted(lambda _: Response(status_code=404), "t", deadline_s=2.0) as (_, client):
        [post], loop = client._pending.snapshot(), client._loop.loop
        wait_until(lambda: post.limit, 20)

        def too_late() -> None:
            time.sleep(max(0.0, post.deadline - loop.time()) + 0.01)
            loop.call_later(0, post.extend, loop.time() + 60)  # behind the deadline's own timer

        loop.call_soon_threadsafe(too_late)
        [outcome] = outcomes(client, 1)
        assert not outcome.ok
        assert "did not answer within 2 s" in outcome.reason


def test_an_answer_counts_from_when_it_was_asked_for() -> None:
    """A late answer does not extend the deadline further."""

    def says(ticket_ids: list[str]) -> Response:
        time.sleep(0.3)  # the server's only thread: nothing else is answered meanwhile
        return all_wait(ticket_ids) if len(metaserver.questions) == 1 else Response(status_code=404)

    began = time.monotonic()
    with posted(says, "t") as (metaserver, client):
        [outcome] = outcomes(client, 1)
        assert not outcome.ok
        assert time.monotonic() - began < DEADLINE_S / 4 * 2 + DEADLINE_S + 0.5


def test_only_the_thread_of_the_event_loop_asks() -> None:
    with posted(all_wait, "t") as (metaserver, client):
        wait_until(lambda: metaserver.questions, 20)
        with pytest.raises(WrongThreadError, match="metaserver-client owns the MetaserverHttp"):
            anyio.run(client._loop._http.still_waiting, "http://127.0.0.1:1/v1/metaserver", ["t"])
