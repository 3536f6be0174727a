# SPDX-License-Identifier: Apache-2.0
"""Tickets whose prefill fails just when nobody waits for it any more, and what is kept of tickets that have ended."""

import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import anyio
import pytest
from proxied import proxied_request, settings_with
from starlette.requests import Request

from vllm_ascend_pd.proxy.http.bodies import parse_client_request
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.messages import RequestRefused
from vllm_ascend_pd.proxy.rendezvous.deliveries import Deliveries
from vllm_ascend_pd.proxy.rendezvous.metaserver import Metaserver
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import Prefill, ProxiedRequest, RequestTable
from vllm_ascend_pd.proxy.rendezvous.tickets import failed
from vllm_ascend_pd.proxy.routing.answers import EngineRole, FailureKind
from vllm_ascend_pd.proxy.routing.dispatch import Attempt, EngineError, EnginePool
from vllm_ascend_pd.proxy.routing.engines import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import NO_PROMPT
from vllm_ascend_pd.transport.names import HostNames


class Pool:
    """Engines that all close the connection once `breaks_off` is set."""

    urls = ("http://a", "http://b", "http://c")

    def __init__(self) -> None:
        self.breaks_off = anyio.Event()
        self.asked: list[str] = []
        self.engines = self
        self.watch = self

    @contextmanager
    def over(self, attempt: Attempt) -> Iterator[None]:
        with anyio.CancelScope() as attempt.scope:
            yield

    def are_used_up(self, _: object) -> bool:
        return False

    def to_avoid(self, _: object) -> frozenset[str]:
        return frozenset()

    def rank(self, *_: object, **__: object) -> EngineRanking:
        return EngineRanking(NO_PROMPT, (self.urls,))

    def get(self, _: str) -> None:
        pass

    def note_request_result(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def open(self, attempt: Attempt, *_: object) -> AsyncIterator[EngineResponse]:
        url = self.urls[len(self.asked)]
        self.asked.append(url)
        attempt.engine = url
        await self.breaks_off.wait()
        raise EngineError(FailureKind.LOST, url, "it broke off")
        yield


def ticket_for(request: ProxiedRequest) -> Request:
    ticket = {"request_id": f"cmpl-{request.request_id}-0", "remote_engine_id": "d", "ticket_id": "t"}
    body = [{"type": "http.request", "body": json.dumps(ticket).encode()}]

    async def receive() -> dict[str, Any]:
        if not body:
            await anyio.sleep_forever()
        return body.pop()

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_a_prefill_is_not_retried_when_nobody_waits_for_it() -> None:
    """The failure counts nevertheless."""
    request_table, pool = RequestTable(1), Pool()
    engines = cast(EnginePool, pool)
    observer = ProxyObserver(request_table, ())
    deliveries = Deliveries(engines, engines, observer, limit=3)
    metaserver = Metaserver(request_table, engines, engines, deliveries, observer, settings_with())

    async def run() -> None:
        statuses: list[int] = []

        async def post(request: ProxiedRequest) -> None:
            with pytest.raises(RequestRefused) as refused:
                await metaserver.post_ticket(ticket_for(request))
            statuses.append(refused.value.status)

        request = proxied_request()
        with request_table.open(request):
            request.parsed = parse_client_request(Endpoint.COMPLETIONS, b'{"prompt": "x"}')
            with request_table.attempt(request):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(post, request)
                    while not pool.asked:
                        await anyio.sleep(0)
                    await anyio.sleep(0)
                    pool.breaks_off.set()
                    request.end_attempt()
            assert len(pool.asked) == 1
            assert statuses == [410]
            assert len(request.prefills[0, "t"].failures) == 1
            assert len(request.prefill_failures[0]) == 1
            assert request.transfer_failure is None

    anyio.run(run)


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_ticket_in_the_place_of_a_failed_one_does_not_hide_why_the_attempt_has_ended(gives_up: bool) -> None:
    """Both may come in one turn of the event loop. Without a reason, the client would get no answer and no retry."""

    async def run() -> None:
        request, table = proxied_request(), RequestTable(1)
        why = failed(FailureKind.TRANSFER, "it broke", "http://p")
        with table.open(request), table.attempt(request):
            first = request.prefill_for(0, "first", 1)
            request.note_transfer_failure(why, first)
            if gives_up:
                request.give_up()
            assert request.prefill_for(0, "second", 1, replaces="first") is not None
            assert request.transfer_failure is (why if gives_up else None)

    anyio.run(run)


def test_the_garbage_collector_has_little_to_do_for_tickets_that_have_ended() -> None:
    """A request of thousands of prompts keeps them all, and a collection stops the event loop."""
    tickets: list[Prefill] = []
    request_table = RequestTable(1)

    pool = EnginePool(EngineRole.PREFILL, settings_with(), HostNames())

    async def serve(ticket: Prefill) -> None:
        with ticket.running(), pool.watch.over(ticket):
            await anyio.sleep(0)

    async def run() -> None:
        request = proxied_request()
        with request_table.open(request), request_table.attempt(request):
            await serve(Prefill(request, 0, ()))
            gc.collect()
            before = len(gc.get_objects())
            for prompt in range(100):
                tickets.append(Prefill(request, prompt, ()))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(serve, tickets[-1])
                    await anyio.sleep(0)
                    tasks.start_soon(tickets[-1].wait)
                await tickets[-1].wait()
            gc.collect()
            assert len(gc.get_objects()) - before < 100 * 4

    anyio.run(run)
