# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the engines of one role: picks an engine, waits for a slot, bounds every wait on HTTP, and ends
requests at engines that have stopped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
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
    FailureKind,
    is_page,
    kind_of,
    may_refuse,
)
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter, NoFreeSlotError
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine, Streak
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, PrefillPace, queue_wait
from vllm_ascend_pd.proxy.routing.registry import EngineRanking, EngineRegistry, SentPrompt
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


class OutgoingRequest(NamedTuple):
    """An HTTP request to whichever engine gets it."""

    method: str
    path: str
    headers: Headers
    content: Content
    request_id: str
    """For the log."""


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
        page = " and a page" if is_page(self.response.header("Content-Type")) else ""
        return f"HTTP {self.response.status}{page}{idle}"


def note_result(engine: RegisteredEngine, streak: Streak, how: str | None) -> None:
    """Records a result in one of an engine's streaks, and logs when that passes it over. `how`: as in Streak."""
    now = time.monotonic()
    if streak.ended(how, now):
        _, reason = engine.gate.state(now)
        log.warning("%s engine %s is passed over for a while: %s", engine.role.value, engine.url, reason)


class EngineCall:
    """A request that is in flight at an engine, or waits for one. All its work runs under `scope`.

    `EnginePool.open` sets `engine` and `work`. `StallWatch` and the metaserver may end the call by `cut_short`.
    """

    def __init__(self) -> None:
        self.engine = ""
        """URL of the engine asked last, which has the request or had it; empty if none was."""
        self.work = 0
        """The tokens of that engine's load when it got the request (`EngineLoad.tokens`), this request included."""
        self._scope: anyio.CancelScope | None = None
        self.cut: tuple[FailureKind, str] | None = None
        """Why `cut_short` ended the call: kind and reason."""
        self.silent_since = time.monotonic()
        """When the engine got the request or last sent something, on `time.monotonic`'s clock. Infinity: nothing is
        expected from it."""

    @property
    def scope(self) -> anyio.CancelScope:
        """Cancelled to end the call."""
        if self._scope is None:
            self._scope = anyio.CancelScope()
        return self._scope

    @property
    def begun(self) -> bool:
        """Whether the engine has begun with the request, so that no other may get it."""
        return False

    @property
    def is_evidence(self) -> bool:
        """Whether what becomes of the call says something about engines. A client's made-up call does not."""
        return True

    @property
    def may_stall(self) -> bool:
        """Whether the engine itself has to compute something for this call now."""
        return True

    def heard(self) -> None:
        """Notes that the engine got the request or sent something, and that more is expected."""
        self.silent_since = time.monotonic()

    def pause(self) -> None:
        """Expects nothing from the engine until `heard` is called."""
        self.silent_since = math.inf

    def cut_short(self, kind: FailureKind, reason: str) -> None:
        """Ends the call as failed. Only the first reason counts."""
        if self.cut is None:
            self.cut = (kind, reason)
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
        self._calls: set[EngineCall] = set()
        """Calls being watched."""
        self._probed: set[str] = set()
        """URLs of engines whose answer to a probe is awaited."""

    def __contains__(self, call: EngineCall) -> bool:
        return call in self._calls

    @contextmanager
    def over(self, call: EngineCall) -> Iterator[None]:
        """Watches a call for the time of the `with` block."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    async def run(self) -> None:
        """Looks at all calls once a second, until cancelled. An engine that does not answer delays no other one."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(_STALL_LOOK_SECONDS)
                awaited = {call.engine for call in self._calls if call.engine and not math.isinf(call.silent_since)}
                for url in awaited - self._probed:
                    tasks.start_soon(self._look_at, url)

    async def _look_at(self, url: str) -> None:
        """Probes an engine, and ends its calls if it has stopped."""
        asked = {call: call.silent_since for call in self._calls if call.engine == url}
        self._probed.add(url)
        try:
            error = await self._probe_error(url)
        finally:
            self._probed.discard(url)
        is_silent = isinstance(error, (ConnectTimeout, ReadTimeout))
        now, engine = time.monotonic(), self._engines.get(url)
        for call, since in asked.items():
            if call not in self._calls or call.engine != url or call.silent_since != since:
                continue  # it has gone on meanwhile
            if is_silent:
                reason = f"no answer to a health probe within {self._probe:g} s"
            elif not call.may_stall:
                continue
            elif error and now - max(since, engine.same_tokens_since if engine else since) >= self._stall:
                reason = f"it takes no connections, and has sent nothing of this request for {self._stall:g} s"
            elif not error and engine and engine.computed_nothing(since) >= self._stall:
                reason = f"its metrics show no new token for {self._stall:g} s"
            else:
                continue
            call.cut_short(FailureKind.TIMEOUT, f"{self._engines.role.value} engine: {reason}")

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
        self.limiter = ConcurrencyLimiter(slots, settings.queue_per_engine, settings.queue_timeout, in_all)
        self.engines = EngineRegistry(role, self.limiter, settings)
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
        return queue_wait(loads, self.limiter.waiting * self.engines.mean_tokens, self.pace.tokens_per_second)

    def judge(self, url: str, kind: FailureKind | None) -> None:
        """Records how a request to an engine ended. `kind`: None if it succeeded. `Deliveries` judges transfers."""
        engine = self.engines.get(url)
        if engine is not None and (kind is None or RULES[self.role, kind].counts is Counts.YES):
            note_result(engine, engine.gate.requests, kind and kind.value)

    def refused_what_others_took(self, engine: RegisteredEngine, how: str) -> None:
        """Records that an engine has refused a request, and another has taken it. `how`: it refused."""
        note_result(engine, engine.gate.requests, f"refused what others took: {how}")

    def busy(self, url: str, why: str, request_id: str) -> EngineError:
        """An engine has said in a stream, which is still open, that it is busy. Others wait until it has room. Returns
        the request's error."""
        log.info("request %s: %s engine %s: %s", request_id, self.role.value, url, why)
        if (engine := self.engines.get(url)) is not None:
            self.limiter.busy(engine)
        return self._busy(url, why)

    @asynccontextmanager
    async def open(
        self, ranking: EngineRanking, request: OutgoingRequest, call: EngineCall
    ) -> AsyncIterator[EngineResponse]:
        """Sends a request; yields the response as soon as its headers have arrived, with the body still unread.

        If an engine of `ranking` cannot be connected to, or does not take the request, others are asked, as `RULES`
        says; if none takes it, the first refusal is the response. A request for which all engines are busy waits. Once
        an engine may have begun with the request, no other is asked.

        Raises EngineError, also for what goes wrong while the body is read inside the `async with`.
        """
        with ExitStack() as held:
            response, sent = await self._send(ranking, request, call, held)
            try:
                yield response
            except EngineError:  # it is busy, as its stream says
                sent.is_taken = False
                raise
            except HttpError as error:
                sent.is_taken = False
                raise self._error(call.engine, error) from error
            finally:
                response.close()

    async def _send(
        self, ranking: EngineRanking, request: OutgoingRequest, call: EngineCall, held: ExitStack
    ) -> tuple[EngineResponse, SentPrompt]:
        """`held` gets the slot and the load of the engine that answers, which both last until it is closed."""
        failure = EngineError(FailureKind.NO_ENGINE, "", f"no {self.role.value} engine is available")
        begun = time.monotonic()
        tried: set[str] = set()
        refusals: list[_Refusal] = []
        while (engine := await self.acquire(ranking, tried, begun)) is not None:
            url = engine.url
            tried.add(url)
            with ExitStack() as slot:
                if ranking.takes_slot:
                    slot.enter_context(self.limiter.releasing(engine))
                if failure.url and call.is_evidence:
                    self.judge(failure.url, failure.kind)  # the caller judges the last engine
                call.engine = url
                sent = slot.enter_context(self.engines.sending(ranking.prompt, url))
                slot.enter_context(engine.serving(sent.load))
                call.heard()
                call.work = self.engines.load(engine, call.silent_since).tokens
                try:
                    response = await self._client.send(
                        request.method, url + request.path, request.headers, request.content
                    )
                    kind = await self._refused(engine, response)
                except _UNREACHABLE as error:
                    failure = self._error(url, error)
                    log.warning(
                        "request %s: cannot connect to %s engine %s (%s): trying the next engine, if there is one",
                        request.request_id,
                        self.role.value,
                        url,
                        error,
                    )
                    continue
                except HttpError as error:
                    raise self._error(url, error) from error
                if kind is None:
                    sent.is_taken = response.is_success
                    if sent.is_taken and call.is_evidence:
                        self._note_taken(engine, refusals)
                    held.push(slot.pop_all())
                    return response, sent
                refusals.append(_Refusal(engine, kind, response, self._has_no_other(engine)))
                log.info("request %s: %s engine %s: %s", request.request_id, self.role.value, url, refusals[-1].how)
                if kind is FailureKind.BUSY and ranking.takes_slot:
                    if call.begun:
                        raise self._busy(url, refusals[-1].how)
                    self.limiter.busy(engine, ranking.group)
                    ranking = ranking._replace(admitted=True)
                    tried.discard(url)
                    continue
            if kind is FailureKind.REFUSED:
                ranking = ranking.beside(url)
            agree = sum(RULES[self.role, each.kind].asks is Asks.ONE for each in refusals)
            if call.begun or agree == 2:
                break
        for_client = [each for each in refusals if each.kind is not FailureKind.BUSY or not ranking.takes_slot]
        if not for_client:
            raise failure
        # An answer about the request says more than one of an engine that takes none.
        chosen = min(for_client, key=lambda each: each.kind is FailureKind.DENIED)
        for each in for_client:
            if each is not chosen and call.is_evidence:
                self.judge(each.engine.url, each.kind)
        call.engine = chosen.engine.url
        return chosen.response, SentPrompt(InFlightLoad())

    async def _refused(self, engine: RegisteredEngine, response: EngineResponse) -> FailureKind | None:
        """How an answer refuses its request; such an answer is closed. None: it does not. Raises HttpError."""
        content_type = response.header("Content-Type")
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
        reported = self.engines.reported(engine, time.monotonic())
        return self.limiter.in_use(engine) <= 1 and not (reported.running or reported.waiting)

    def _note_taken(self, engine: RegisteredEngine, refusals: Sequence[_Refusal]) -> None:
        """Notes that an engine has taken a request that others refused before."""
        for each in refusals:
            counts = RULES[self.role, each.kind].counts
            if counts is Counts.NO or each.engine is engine or (counts is Counts.IF_IDLE and not each.is_idle):
                continue
            self.refused_what_others_took(each.engine, each.how)

    async def acquire(
        self, ranking: EngineRanking, tried: Collection[str], begun: float | None = None
    ) -> RegisteredEngine | None:
        """Takes a slot at the next engine to ask, unless the request needs none. Returns None if all engines were tried
        or are gone. Raises EngineError if all are full or busy. `begun`: since when the request has waited; None: now.
        """
        avoid = {*ranking.avoid, *tried}
        begun = time.monotonic() if begun is None else begun
        tiers = ranking.tiers
        while candidates := self._first_open(tiers, tried):
            if not ranking.takes_slot:
                return candidates[0]
            waited = time.monotonic() - begun
            try:
                engine = await self.limiter.acquire(candidates, ranking.admitted, avoid, ranking.group, waited)
            except NoFreeSlotError as full:
                if any(map(self.limiter.is_busy, candidates)):
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
            if candidates := [engine for engine in known if engine is not None and engine.open]:
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
