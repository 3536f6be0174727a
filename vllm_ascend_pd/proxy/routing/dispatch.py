# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the engines of one role: picks an engine, waits for a slot, bounds every wait on HTTP, and ends
requests at engines that have stopped.

`Attempt` is a request on its way to an engine. `EnginePool.open` sends it; `StallWatch` ends it if the engine stops.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import NamedTuple

import anyio

from vllm_ascend_pd.proxy.http.bodies import Content
from vllm_ascend_pd.proxy.http.engine_client import (
    ConnectError,
    ConnectionLost,
    ConnectTimeout,
    EngineClient,
    EngineResponse,
    HttpError,
    ReadTimeout,
)
from vllm_ascend_pd.proxy.http.messages import Headers, TooLarge
from vllm_ascend_pd.proxy.routing.answers import (
    RULES,
    Asks,
    Counts,
    EngineRole,
    Failure,
    FailureKind,
    are_used_up,
    engines_to_avoid,
    is_page,
    kind_of,
    may_refuse,
)
from vllm_ascend_pd.proxy.routing.engines import EngineRanking, EngineRegistry, RegisteredEngine, Streak
from vllm_ascend_pd.proxy.routing.load import PrefillPace, queue_wait, tokens_without_wait
from vllm_ascend_pd.proxy.routing.queue import Group, NoFreeSlotError, Queue
from vllm_ascend_pd.proxy.settings import ProxySettings
from vllm_ascend_pd.transport.names import HostNames

log = logging.getLogger(__name__)


class EngineError(Exception):
    """No engine could be asked, or an engine could not be reached, broke off or stayed silent. The message names no
    address: clients get it."""

    def __init__(self, kind: FailureKind, url: str, reason: str) -> None:
        self.kind = kind
        self.url = url
        """The engine's; empty if none was asked."""
        self.status = _STATUS.get(kind, HTTPStatus.BAD_GATEWAY)
        """For the client."""
        super().__init__(reason)


_STATUS = {
    FailureKind.TIMEOUT: HTTPStatus.GATEWAY_TIMEOUT,
    FailureKind.NO_ENGINE: HTTPStatus.SERVICE_UNAVAILABLE,
    FailureKind.FULL: HTTPStatus.TOO_MANY_REQUESTS,
    FailureKind.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
}
_UNREACHABLE = (ConnectError, ConnectTimeout)
_MAX_REFUSAL_BYTES = 1024 * 1024
_STALL_LOOK_SECONDS = 1.0
_PREFILLS_PER_REQUEST = 4
"""A request with several prompts or samples (n) has several prefills. If there are more per request, on average, they
wait for each other, so that connections do not run out."""


class _Refusal(NamedTuple):
    """An answer by which an engine does not take a request."""

    engine: RegisteredEngine
    kind: FailureKind
    response: EngineResponse
    """Closed, but its body can be read."""
    is_idle: bool
    """Whether the engine had no other request."""

    @property
    def how(self) -> str:
        idle = " with no request in flight" if self.kind is FailureKind.BUSY else ""
        page = " and a page" if is_page(self.response.content_type) else ""
        return f"HTTP {self.response.status}{page}{idle}"


def note_result(engine: RegisteredEngine, streak: Streak, how: str | None) -> None:
    """Records a result in one of an engine's streaks, and logs when that passes it over. `how`: as in Streak."""
    now = time.monotonic()
    if streak.ended(how, now):
        _, reason = engine.gate.state(now)
        log.warning("%s engine %s is passed over for a while: %s", engine.role.value, engine.url, reason)


class Attempt:
    """A request on its way to an engine of one role: it waits for one, then it is there.

    A prefill is one attempt. A client's request has one attempt at decode after the other, and these fields are those
    of the latest (`_begin`). `EnginePool.open` and `StallWatch` set most of them. The watch and the metaserver may end
    an attempt by `cut_short`.
    """

    group: Group | None = None
    """The requests with which it counts as one in the queue."""
    is_evidence = True
    """Whether what becomes of it says something about engines. A client's made-up ticket does not."""
    gives_way = False
    """Whether it gives way in the queue, because its engine may let it wait until others have ended."""

    def __init__(self) -> None:
        self.request_id = ""
        """The proxy's, for the log."""
        self.readmitted = False
        """Whether it had a slot before. It then waits before requests that had none."""
        self._begin()

    def _begin(self) -> None:
        """It is at no engine yet."""
        self.engine = ""
        """URL of the engine asked last, which has the request or had it. Empty if none was, or that one refused it."""
        self.begun = False
        """Whether the engine has begun with the request, so that no other may get it."""
        self.is_taken = False
        """Whether the engine has taken it. Then its prefix cache has the prompt."""
        self.work = 0
        """The tokens of that engine's load when it got the request (`EngineLoad.tokens`), this request included."""
        self.scope: anyio.CancelScope | None = None
        """All work at the engine runs under it. None: there is none now."""
        self.cut: tuple[FailureKind, str] | None = None
        """Why `cut_short` ended the attempt: kind and reason."""
        self.silent_since = time.monotonic()
        """When the engine got the request or last sent something, on `time.monotonic`'s clock. Infinity: nothing is
        expected from it."""

    @property
    def may_stall(self) -> bool:
        """Whether the engine itself has to compute something for this request now."""
        return True

    def cut_short(self, kind: FailureKind, reason: str) -> None:
        """Ends the attempt as failed. Only the first reason counts."""
        if self.cut is None:
            self.cut = (kind, reason)
            if self.scope is not None:
                self.scope.cancel()


class StallWatch:
    """Probes the engines of one role while requests wait for their bytes, and ends the requests at those that stopped.

    A request at an engine that answers and computes may take any time. A stopped process keeps its connections open, so
    only a probe tells it from one that computes. An engine that takes no more connections may still end its requests.
    But vLLM's API server can outlive its engine core like that, and wait for answers that nobody computes.
    """

    def __init__(self, engines: EngineRegistry, client: EngineClient, settings: ProxySettings) -> None:
        self._engines = engines
        self._client = client
        self._probe = settings.probe_timeout
        """Seconds to answer a health probe."""
        self._stall = settings.read_timeout
        """Seconds without a byte of a request, and without a new token in the engine's own metrics, as long as it shows
        them."""
        self._attempts: set[Attempt] = set()
        """Attempts being watched."""
        self._probed: set[str] = set()
        """URLs of engines whose answer to a probe is awaited."""

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._attempts

    @contextmanager
    def over(self, attempt: Attempt) -> Iterator[anyio.CancelScope]:
        """Watches an attempt for the time of the `with` block, which runs under its scope."""
        self._attempts.add(attempt)
        try:
            with anyio.CancelScope() as scope:
                attempt.scope = scope
                yield scope
        finally:
            attempt.scope = None
            self._attempts.discard(attempt)

    async def run(self) -> None:
        """Looks at all attempts once a second, until cancelled. An engine that does not answer delays no other one."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(_STALL_LOOK_SECONDS)
                awaited = {each.engine for each in self._attempts if each.engine and not math.isinf(each.silent_since)}
                for url in awaited - self._probed:
                    tasks.start_soon(self._look_at, url)

    async def _look_at(self, url: str) -> None:
        """Probes an engine, and ends the attempts there if it has stopped."""
        asked = {attempt: attempt.silent_since for attempt in self._attempts if attempt.engine == url}
        self._probed.add(url)
        try:
            error = await self._probe_error(url)
        finally:
            self._probed.discard(url)
        is_silent = isinstance(error, (ConnectTimeout, ReadTimeout))
        now, engine = time.monotonic(), self._engines.with_requests(url)
        for attempt, since in asked.items():
            if attempt not in self._attempts or attempt.engine != url or attempt.silent_since != since:
                continue  # it has gone on meanwhile
            if is_silent:
                reason = f"no answer to a health probe within {self._probe:g} s"
            elif not attempt.may_stall:
                continue
            elif error and now - max(since, engine.same_tokens_since if engine else since) >= self._stall:
                reason = f"it takes no connections, and has sent nothing of this request for {self._stall:g} s"
            elif not error and engine and engine.computed_nothing(since) >= self._stall:
                reason = f"its metrics show no new token for {self._stall:g} s"
            else:
                continue
            attempt.cut_short(FailureKind.TIMEOUT, f"{self._engines.role.value} engine: {reason}")

    async def _probe_error(self, url: str) -> HttpError | None:
        """Probes an engine's health. Returns None if it answers, whatever it says."""
        try:
            with anyio.fail_after(self._probe):
                async with self._client.get(f"{url}/health", self._probe):
                    return None
        except TimeoutError:  # it took its connection and its answer together
            return ReadTimeout()
        except HttpError as error:
            return error


class EnginePool:
    """The engines of one role as the rest of the proxy uses them."""

    def __init__(self, role: EngineRole, settings: ProxySettings, host_names: HostNames) -> None:
        """A pool without engines."""
        prefills = role is EngineRole.PREFILL
        slots = settings.max_per_prefill if prefills else settings.max_per_decode
        self.role = role
        in_all = settings.max_concurrent * _PREFILLS_PER_REQUEST if prefills else None
        self.queue: Queue[RegisteredEngine] = Queue(slots, settings.queue_per_engine, settings.queue_timeout, in_all)
        self.engines = EngineRegistry(role, self.queue, settings)
        self._most_attempts = settings.attempts
        self._client = EngineClient(
            host_names, connect_timeout=settings.connect_timeout, read_timeout=settings.silence_timeout
        )
        self.watch = StallWatch(self.engines, self._client, settings)
        """Ends requests at engines that have stopped."""
        self.pace = PrefillPace()
        """Of its prefills, for `queue_wait`."""

    def queue_wait(self, doubted: Collection[str] = ()) -> float | None:
        """Estimates the seconds that a further prompt would wait for a prefill engine; 0 if unknown. None: no engine is
        well, but for those in `doubted`."""
        now = time.monotonic()
        well = [engine for engine in self.engines.well(now) if engine.url not in doubted]
        loads = [self.engines.load(engine, now) for engine in well]
        if not loads:
            return None
        return queue_wait(loads, self._queued_tokens, self.pace.tokens_per_second)

    def prefill_first_tokens(self) -> int:
        """Prompts of more tokens may be computed before decode gives them memory, at whichever prefill engine that is
        well. With what is computed before them, they take more than a step there. 0: none may."""
        now = time.monotonic()
        well = self.engines.well(now)
        loads = [self.engines.load(engine, now) for engine in well]
        reported = [self.engines.reported_load(engine, now) for engine in well]
        return tokens_without_wait(loads, reported, self._queued_tokens)

    @property
    def _queued_tokens(self) -> float:
        """Tokens of the prompts that wait until any of the engines takes them."""
        return self.queue.waiting * self.engines.mean_tokens

    def to_avoid(self, failures: Sequence[Failure]) -> frozenset[str] | None:
        """The engines that the next attempt must not use, or None if there is none. `failures`: of all so far."""
        return engines_to_avoid(self.role, self.engines.urls, failures, self._most_attempts)

    def are_used_up(self, failures: Sequence[Failure]) -> bool:
        """Whether a request has had all its attempts. `failures`: of all so far."""
        return are_used_up(self.role, self.engines.urls, failures, self._most_attempts)

    def note_request_result(self, url: str, kind: FailureKind | None) -> None:
        """Records how a request to an engine ended. `kind`: None if it succeeded. `Deliveries` records transfers."""
        engine = self.engines.get(url)
        if engine is not None and (kind is None or RULES[self.role, kind].counts is Counts.YES):
            note_result(engine, engine.gate.requests, kind and kind.value)

    def refused_what_others_took(self, engine: RegisteredEngine, how: str) -> None:
        """Records that an engine has refused a request, and another has taken it. `how`: it refused."""
        note_result(engine, engine.gate.requests, f"refused what others took: {how}")

    def busy(self, url: str, why: str, request_id: str) -> EngineError:
        """An engine has said in a stream, which is still open, that it is busy. Others wait for a free slot. Returns
        the request's error."""
        log.info("request %s: %s engine %s: %s", request_id, self.role.value, url, why)
        if (engine := self.engines.get(url)) is not None:
            self.queue.note_busy(engine)
        return self._busy(url, why)

    @asynccontextmanager
    async def open(
        self, attempt: Attempt, ranking: EngineRanking, method: str, path: str, headers: Headers, content: Content
    ) -> AsyncIterator[EngineResponse]:
        """Sends a request; yields the response as soon as its headers have arrived, with the body still unread.

        If an engine of `ranking` cannot be connected to, or does not take the request, others are asked, as `RULES`
        says; if none takes it, one of the refusals is the response. A request for which all engines are busy waits.
        Once an engine may have begun with the request, no other is asked.

        Raises EngineError, also for what goes wrong while the body is read inside the `async with`.
        """
        failure: EngineError | None = None
        since = time.monotonic()
        unreachable = ""
        tried: set[str] = set()
        refusals: list[_Refusal] = []
        while (engine := await self.acquire(attempt, ranking, tried, since)) is not None:
            url = engine.url
            tried.add(url)
            if unreachable and attempt.is_evidence:
                self.note_request_result(unreachable, FailureKind.UNREACHABLE)  # the caller notes the last one
            unreachable = ""
            with self._at(engine, attempt, ranking):
                try:
                    response = await self._client.send(method, url + path, headers, content)
                    kind = await self._refused(engine, response)
                except _UNREACHABLE as error:
                    failure, unreachable = self._error(url, error), url
                    log.warning(
                        "request %s: cannot connect to %s engine %s (%s): trying the next engine, if there is one",
                        *(attempt.request_id, self.role.value, url, error),
                    )
                    continue
                except HttpError as error:
                    raise self._error(url, error) from error
                if kind is None:
                    attempt.is_taken = response.is_success
                    if refusals and attempt.is_taken and attempt.is_evidence:
                        self._note_taken(engine, refusals)
                    try:
                        yield response
                    except EngineError:  # it is busy, as its stream says
                        attempt.is_taken = False
                        raise
                    except HttpError as error:
                        attempt.is_taken = False
                        raise self._error(url, error) from error
                    finally:
                        response.close()
                    return
                refusals.append(_Refusal(engine, kind, response, self._has_no_other(engine)))
                attempt.engine = ""  # while it waits for another, the watch must not end it because this one stops
                log.info("request %s: %s engine %s: %s", attempt.request_id, self.role.value, url, refusals[-1].how)
                if kind is FailureKind.BUSY and ranking.takes_slot:
                    if attempt.begun:
                        raise self._busy(url, refusals[-1].how)
                    self.queue.note_busy(engine, attempt.group)
                    attempt.readmitted = True
                    tried.discard(url)
                    continue
            if kind is FailureKind.REFUSED and url in ranking.tiers[0]:
                ranking = ranking._replace(tiers=ranking.tiers[:1])  # a doubtful engine's answer counts less
            # Where the rule asks one other engine, the second refusal is believed.
            believed = sum(RULES[self.role, each.kind].asks is Asks.ONE for each in refusals) == 2
            if attempt.begun or believed:
                break
        for_client = [each for each in refusals if each.kind is not FailureKind.BUSY or not ranking.takes_slot]
        if not for_client:
            none = f"no {self.role.value} engine is available"
            raise failure or EngineError(FailureKind.NO_ENGINE, "", none)
        # An answer about the request says more than one of an engine that takes none.
        chosen = min(for_client, key=lambda each: each.kind is FailureKind.DENIED)
        for each in for_client:
            if each is not chosen and attempt.is_evidence:
                self.note_request_result(each.engine.url, each.kind)
        attempt.engine = chosen.engine.url
        yield chosen.response

    @contextmanager
    def _at(self, engine: RegisteredEngine, attempt: Attempt, ranking: EngineRanking) -> Iterator[None]:
        """The time in which a request is at an engine, where it has a slot."""
        attempt.engine, attempt.is_taken = engine.url, False
        load = self.engines.sent(ranking.prompt, engine)
        attempt.silent_since = time.monotonic()
        attempt.work = self.engines.load(engine, attempt.silent_since).tokens
        try:
            yield
        finally:
            self.engines.ended(ranking.prompt, engine, load, attempt.is_taken)
            if ranking.takes_slot:
                self.queue.release(engine, attempt.gives_way)

    async def _refused(self, engine: RegisteredEngine, response: EngineResponse) -> FailureKind | None:
        """How an answer refuses its request; such an answer is closed. None: it does not. Raises HttpError."""
        content_type = response.content_type
        kind = None
        try:
            if may_refuse(response.status, content_type):
                body = await response.buffer(_MAX_REFUSAL_BYTES)
                is_alive = engine.gate.answers or engine.asleep  # one that sleeps, or slept just now, is itself
                kind = kind_of(self.role, response.status, content_type, body, is_alive)
        except TooLarge:
            response.close()
            raise ConnectionLost("the error is too long") from None
        except BaseException:
            response.close()
            raise
        if kind is not None:
            response.close()
        return kind

    def _has_no_other(self, engine: RegisteredEngine) -> bool:
        """Whether nothing is known of any request at an engine but one of this proxy."""
        reported = self.engines.reported_load(engine, time.monotonic())
        return engine.slots_used <= 1 and not (reported.running or reported.waiting)

    def _note_taken(self, engine: RegisteredEngine, refusals: Sequence[_Refusal]) -> None:
        """Notes that an engine has taken a request that others refused before."""
        for each in refusals:
            counts = RULES[self.role, each.kind].counts
            if counts is Counts.NO or each.engine is engine or (counts is Counts.IF_IDLE and not each.is_idle):
                continue
            self.refused_what_others_took(each.engine, each.how)

    async def acquire(
        self, attempt: Attempt, ranking: EngineRanking, tried: Collection[str], since: float
    ) -> RegisteredEngine | None:
        """Takes a slot at the next engine to ask, unless the request needs none. Returns None if all engines were tried
        or are gone. Raises EngineError if all are full or busy. `since`: when the request began to wait, on
        `time.monotonic`'s clock."""
        tiers = ranking.tiers
        while candidates := self._first_open(tiers, tried):
            if not ranking.takes_slot:
                return candidates[0]
            avoid = {*ranking.avoid, *tried}
            try:
                engine = await self.queue.acquire(
                    candidates,
                    readmitted=attempt.readmitted,
                    avoid={*avoid, *ranking.doubted},
                    group=attempt.group,
                    waited=time.monotonic() - since,
                    gives_way=attempt.gives_way,
                )
            except NoFreeSlotError as full:
                if any(each.busy is not None for each in candidates):
                    raise self._busy("", str(full)) from None
                reason = f"all {self.role.value} engines are busy: {full}: retry later"
                raise EngineError(FailureKind.FULL, "", reason) from None
            if engine is not None:
                return engine
            # All candidates have gone meanwhile. Engines that were added are ranked as usual.
            tiers = (*self.engines.rank(ranking.prompt, avoid).tiers, *ranking.tiers)
        return None

    def _first_open(self, tiers: Sequence[Sequence[str]], tried: Collection[str]) -> list[RegisteredEngine]:
        """The untried engines that may get requests, of the first tier that has any."""
        for tier in tiers:
            known = (self.engines.get(url) for url in tier if url not in tried)
            if candidates := [engine for engine in known if engine is not None and engine.takes_requests]:
                return candidates
        return []

    def _error(self, url: str, cause: HttpError) -> EngineError:
        if isinstance(cause, _UNREACHABLE):
            kind = FailureKind.UNREACHABLE
        else:
            kind = FailureKind.TIMEOUT if isinstance(cause, ReadTimeout) else FailureKind.LOST
        return EngineError(kind, url, f"{self.role.value} engine: {cause}")

    def _busy(self, url: str, why: str) -> EngineError:
        return EngineError(FailureKind.BUSY, url, f"all {self.role.value} engines are busy: {why}: retry later")

    async def aclose(self) -> None:
        await self._client.aclose()
