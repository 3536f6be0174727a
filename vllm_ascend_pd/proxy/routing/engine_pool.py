# SPDX-License-Identifier: Apache-2.0
"""The engines of one role: which one gets a request, and HTTP to it with every wait bounded."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

from vllm_ascend_pd.proxy.http.engine_client import (
    ConnectError,
    ConnectTimeout,
    EngineClient,
    EngineResponse,
    HttpError,
    PoolTimeout,
    ReadTimeout,
)
from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.routing.balance import STRATEGIES, EngineLoad, decode_costs, prefill_costs
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter, NoFreeSlotError, RequestGroup
from vllm_ascend_pd.proxy.routing.failure_kind import DECODE_BLAMED, PREFILL_BLAMED, FailureKind
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadSnapshot, decode_load, prefill_load
from vllm_ascend_pd.proxy.routing.prompts import PromptEstimate
from vllm_ascend_pd.proxy.routing.registry import MAX_ENGINES, EngineRegistry, EngineRole, RegisteredEngine

log = logging.getLogger(__name__)


class EngineError(Exception):
    """An engine that could not be reached, broke off or stayed silent, or none that may be asked. The message names no
    address."""

    def __init__(self, kind: FailureKind, url: str, reason: str) -> None:
        self.kind = kind
        self.url = url
        self.status = _STATUS.get(kind, HTTPStatus.BAD_GATEWAY)
        super().__init__(reason)


_STATUS = {
    FailureKind.TIMEOUT: HTTPStatus.GATEWAY_TIMEOUT,
    FailureKind.NO_ENGINE: HTTPStatus.SERVICE_UNAVAILABLE,
    FailureKind.FULL: HTTPStatus.TOO_MANY_REQUESTS,
}
_UNREACHABLE = (ConnectError, ConnectTimeout)
# The mean length of prompts: of about so many, and before there is one.
_MEAN_OF = 32
_FIRST_MEAN = 512.0


class EngineRanking(NamedTuple):
    """Who is asked for a prompt, best first."""

    prompt: PromptEstimate
    tiers: tuple[tuple[str, ...], ...]
    """An engine is asked, or waited for, only if none of the tiers before can be reached."""
    avoid: Collection[str] = ()
    """Who is not asked, should it come while the request waits."""
    admitted: bool = False
    """The request had a place before: it waits for another in front of those that had none."""
    group: RequestGroup | None = None
    """With whom it waits for a place."""

    @property
    def first(self) -> str:
        return next((url for tier in self.tiers for url in tier), "")

    def then(self, urls: Sequence[str]) -> EngineRanking:
        return self._replace(tiers=(*self.tiers, tuple(urls)))

    def of_one_admitted(self) -> EngineRanking:
        return self._replace(admitted=True)


class EnginePool:
    def __init__(
        self,
        engines: EngineRegistry,
        strategy: str,
        limiter: ConcurrencyLimiter,
        *,
        max_connections: int,
        connect_timeout: float,
        read_timeout: float,
        fresh_for: float,
    ) -> None:
        """`strategy`: of `balance.STRATEGIES`. `fresh_for`: seconds that what an engine said of its load counts."""
        self.engines = engines
        self.role = engines.role
        prefills = self.role is EngineRole.PREFILL
        self._load = prefill_load if prefills else decode_load
        self._blamed = PREFILL_BLAMED if prefills else DECODE_BLAMED
        self._strategy = STRATEGIES[strategy](prefill_costs if prefills else decode_costs)
        self.limiter = limiter
        engines.on_gone = self._strategy.forget
        engines.on_open = limiter.engine_opened
        engines.on_closed = limiter.engine_closed
        self._fresh_for = fresh_for
        self._mean_tokens = _FIRST_MEAN
        self._client = EngineClient(
            max_connections=max_connections + MAX_ENGINES,  # one for each engine's health probe
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines that may be asked now."""
        return self.engines.urls

    def order(
        self, prompt: PromptEstimate, avoid: Collection[str] = (), group: RequestGroup | None = None
    ) -> EngineRanking:
        """Of all engines but those in `avoid`; those that do not look healthy are a tier of their own, the last.
        `group`: with whom the prompt waits for a place."""
        now = time.monotonic()
        engines = {engine.url: engine for engine in self.engines if engine.open and engine.url not in avoid}
        ranked = self._strategy.order(prompt, [self.load(engine, now) for engine in engines.values()])
        doubtful = tuple(url for url in ranked if engines[url].doubtful(now))
        tiers = (tuple(url for url in ranked if url not in doubtful), doubtful)
        return EngineRanking(prompt, tiers, avoid, group=group)

    def load(self, engine: RegisteredEngine, now: float) -> EngineLoad:
        return self._load(engine.url, engine.sent, engine.seen(now, self._fresh_for), self._mean_tokens)

    def reported(self, engine: RegisteredEngine, now: float) -> LoadSnapshot | None:
        """What the engine itself said of its load, unless that is too old to count."""
        seen = engine.seen(now, self._fresh_for)
        return None if seen is None else seen.snapshot

    def judge(self, url: str, kind: FailureKind | None) -> None:
        """A request to an engine ended: how it failed, or None."""
        engine = self.engines.get(url)
        if engine is not None and (kind is None or kind in self._blamed):
            engine.served(kind is None, time.monotonic())

    @asynccontextmanager
    async def open(
        self,
        choice: EngineRanking,
        method: str,
        path: str,
        *,
        headers: Headers,
        content: bytes = b"",
        request_id: str,
        asked: list[str],
    ) -> AsyncIterator[EngineResponse]:
        """Sends the request; yields the answer as soon as its headers are there, its body still unread.

        An engine of `choice` that cannot be connected to is replaced by the next; after all of them, each where that
        took too long is tried once more. Once anything may have been sent there is no second try here: the engine may
        be working on it. `asked` gets the URL of each engine as its turn comes. Raises EngineError, also for what goes
        wrong while the body is read inside the `async with`.
        """
        with ExitStack() as held:
            answer = await self._send(choice, method, path, headers, content, request_id, asked, held)
            try:
                yield answer
            except HttpError as error:
                raise self._error(asked[-1], error) from error
            finally:
                answer.close()

    async def _send(
        self,
        choice: EngineRanking,
        method: str,
        path: str,
        headers: Headers,
        content: bytes,
        request_id: str,
        asked: list[str],
        held: ExitStack,
    ) -> EngineResponse:
        """`held` is closed when the engine has answered: until then it counts as loaded."""
        failure = EngineError(FailureKind.NO_ENGINE, "", f"there is no {self.role.value} engine to ask")
        tried: set[str] = set()
        # A timeout may also say that this process, or the whole machine, stood still.
        late: set[str] = set()
        while (engine := await self._place(choice, tried) or await self._place(choice, tried - late)) is not None:
            url = engine.url
            late.discard(url)
            first_time = url not in tried
            tried.add(url)
            with ExitStack() as place:
                place.enter_context(self.limiter.releasing(engine))
                if failure.url:
                    self.judge(failure.url, failure.kind)  # the caller judges the last one
                asked.append(url)
                place.enter_context(engine.serving(self._count(choice.prompt, url)))
                try:
                    answer = await self._client.send(method, url + path, headers, content)
                except _UNREACHABLE as error:
                    if first_time and isinstance(error, ConnectTimeout):
                        late.add(url)
                    failure = self._error(url, error)
                    log.warning(
                        "request %s: no connection to %s engine %s (%s): trying the next one, if there is any",
                        request_id,
                        self.role.value,
                        url,
                        error,
                    )
                    continue
                except HttpError as error:
                    raise self._error(url, error) from error
                held.push(place.pop_all())
                return answer
        raise failure

    async def _place(self, choice: EngineRanking, tried: Collection[str]) -> RegisteredEngine | None:
        """Takes a slot at the next engine to ask. None: all were tried, or are gone. Raises EngineError when all are
        full."""
        avoid = {*choice.avoid, *tried}
        begun = time.monotonic()
        tiers = choice.tiers
        while left := self._first_left(tiers, tried):
            try:
                engine = await self.limiter.acquire(
                    left, choice.admitted, avoid, choice.group, time.monotonic() - begun
                )
            except NoFreeSlotError as full:
                raise self._full(str(full)) from None
            if engine is not None:
                return engine
            # They have all gone. Others may have come, and are asked as strategy and health say.
            tiers = (*self.order(choice.prompt, avoid).tiers, *choice.tiers)
        return None

    def _first_left(self, tiers: Sequence[Sequence[str]], tried: Collection[str]) -> list[RegisteredEngine]:
        """Of the first tier of which any engine may be asked, those that may."""
        for tier in tiers:
            known = (self.engines.get(url) for url in tier if url not in tried)
            if left := [engine for engine in known if engine is not None and engine.open]:
                return left
        return []

    def _count(self, prompt: PromptEstimate, url: str) -> InFlightLoad:
        """What is sent with a prompt."""
        if prompt.sequences:
            self._mean_tokens += (prompt.tokens - self._mean_tokens) / _MEAN_OF
        return InFlightLoad(prompt.sequences, self._strategy.sent(prompt, url))

    def _error(self, url: str, cause: HttpError) -> EngineError:
        if isinstance(cause, PoolTimeout):
            return self._full("as many requests as there may be are under way (--max-concurrent)")
        if isinstance(cause, _UNREACHABLE):
            kind = FailureKind.UNREACHABLE
        else:
            kind = FailureKind.TIMEOUT if isinstance(cause, ReadTimeout) else FailureKind.LOST
        return EngineError(kind, url, f"{self.role.value} engine: {cause}")

    def _full(self, bound: str) -> EngineError:
        return EngineError(FailureKind.FULL, "", f"all {self.role.value} engines are busy: {bound}: retry later")

    async def probe(self, url: str, timeout: float) -> str:
        """ "ok", or why the engine does not look healthy."""
        try:
            async with self._client.get(f"{url}/health", timeout) as answer:
                return "ok" if answer.is_success else f"HTTP {answer.status}"
        except HttpError as error:
            return str(error)

    async def is_silent(self, url: str, timeout: float) -> bool:
        """Whether an engine neither answers a health probe nor refuses to: one that breaks off shows it elsewhere."""
        try:
            async with self._client.get(f"{url}/health", timeout):
                return False
        except HttpError as error:
            return isinstance(error, (ConnectTimeout, ReadTimeout))

    def computed_nothing(self, url: str, since: float) -> float:
        """For how many seconds after `since` an engine's own metrics say that it computed no token; 0: they do not
        say."""
        engine = self.engines.get(url)
        return 0.0 if engine is None else engine.computed_nothing(since)

    def idle(self, url: str, since: float, now: float) -> float:
        """For how many seconds after `since` an engine has served no request, and its metrics show no other work."""
        engine = self.engines.get(url)
        return now - (since if engine is None else max(since, engine.worked_at))

    async def aclose(self) -> None:
        await self._client.aclose()
