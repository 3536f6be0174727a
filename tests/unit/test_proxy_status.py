# SPDX-License-Identifier: Apache-2.0
"""The status snapshot: all figures, and nothing that a client sent."""

import time
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from proxied import proxied_request, settings_with
from starlette.responses import Response

from vllm_ascend_pd import __version__
from vllm_ascend_pd.proxy.operate.status import Status, StatusPage, Verdict
from vllm_ascend_pd.proxy.rendezvous.observer import MAX_RECENT, ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import Prefill, RequestPhase, RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool
from vllm_ascend_pd.proxy.routing.engines import EngineState
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadSnapshot
from vllm_ascend_pd.proxy.routing.strategies import PromptEstimate
from vllm_ascend_pd.transport.names import HostNames

pytestmark = pytest.mark.anyio

NOW, WALL = 1000.0, 1.8e9
FRESH_SECONDS = 5.0


class Proxy:
    """The parts of a proxy that a snapshot reads: one prefill and one decode engine, each with one good check."""

    def __init__(self, limit: int | None = None) -> None:
        self.prefill, self.decode = (self._pool(role, limit) for role in EngineRole)
        self.request_table = RequestTable(limit=8)
        self.observer = ProxyObserver(self.request_table, (self.prefill, self.decode))
        self.problems: dict[str, str] = {}
        self.p, self.d = self.prefill.engines.add("http://p:1", "test"), self.decode.engines.add("http://d:1", "test")
        for engine in (self.p, self.d):
            engine.gate.checked(None)

    @staticmethod
    def _pool(role: EngineRole, limit: int | None) -> EnginePool:
        limits = {"max_per_prefill": limit, "max_per_decode": limit, "eject_after": 2, "return_after": 2}
        return EnginePool(role, settings_with(check_interval=1.0, health_timeout=1.0, **limits), HostNames())

    def fail(self, role: EngineRole, kind: FailureKind, reason: str) -> None:
        url = (self.p if role is EngineRole.PREFILL else self.d).url
        self.observer.attempt_failed(role, Failure(kind, reason, url, Response()), "0123456789abcdef")

    def status(self, after: float = 0.0) -> Status:
        """The status when so many seconds have passed."""
        page = StatusPage((self.prefill, self.decode), self.request_table, self.observer, lambda: self.problems, None)
        with pytest.MonkeyPatch.context() as clock:
            clock.setattr(time, "monotonic", lambda: NOW + after)
            clock.setattr(time, "time", lambda: WALL)
            return page.status()

    def shown(self) -> dict[str, Any]:
        """As the page reads it."""
        return msgspec.json.decode(msgspec.json.encode(self.status()))


def test_idle_proxy() -> None:
    shown = Proxy().shown()
    assert {name: shown[name] for name in ("version", "time", "verdict", "problems", "failures")} == {
        "version": __version__,
        "time": WALL,
        "verdict": "ok",
        "problems": [],
        "failures": [],
    }
    assert shown["requests"] == {
        "in_flight": 0,
        "limit": 8,
        "waiting": 0,
        "phases": {phase.value: 0 for phase in RequestPhase},
    }
    assert [role["role"] for role in shown["roles"]] == ["prefill", "decode"]
    [engine] = shown["roles"][0].pop("engines")
    assert shown["roles"][0] == {"role": "prefill", "seats_per_engine": None, "waiting": 0, "retries": 0, "failures": 0}
    assert engine.pop("id").startswith("prefill-")
    assert engine == {
        "role": "prefill",
        "url": "http://p:1",
        "state": "healthy",
        "reason": None,
        "listed_by": ["test"],
        "in_flight": 0,
        "seats_taken": 0,
        "tokens": 0,
        "running": None,
        "queued": None,
        "kv_tokens": None,
        "kv_capacity": None,
        "wrong_kv": None,
        "kv_waiting": None,
    }


async def test_shown_load_is_the_load_used_for_routing() -> None:
    proxy = Proxy(limit=3)
    shown = LoadSnapshot(running=4, waiting=1, kv_tokens=700, capacity=1000, wrong_kv=3, kv_waiting=0.5)
    proxy.d.note(shown, InFlightLoad(), now=NOW)
    with ExitStack() as held:
        for _ in range(2):
            assert await proxy.decode.queue.acquire([proxy.d]) is proxy.d
            held.callback(proxy.decode.queue.release, proxy.d)
        prompt = PromptEstimate(50, sequences=2)
        load = proxy.decode.engines.sent(prompt, proxy.d)
        held.callback(proxy.decode.engines.ended, prompt, proxy.d, load, is_taken=True)
        role = proxy.status().roles[1]
        [engine] = role.engines
        assert (role.seats_per_engine, role.waiting) == (3, 0)
        assert (engine.in_flight, engine.seats_taken, engine.tokens) == (2, 2, 750)
        assert (engine.running, engine.queued, engine.kv_tokens, engine.kv_capacity) == (4, 1, 700, 1000)
        assert (engine.wrong_kv, engine.kv_waiting) == (3, 0.5)
        [stale] = proxy.status(FRESH_SECONDS + 1).roles[1].engines
        assert (stale.running, stale.kv_tokens, stale.tokens) == (None, None, 50)
    [after] = proxy.status().roles[1].engines
    assert (after.in_flight, after.seats_taken) == (0, 0)


def state_of_prefill(proxy: Proxy, after: float = 0.0) -> tuple[EngineState, str | None, Verdict]:
    status = proxy.status(after)
    [engine] = status.roles[0].engines
    return engine.state, engine.reason, status.verdict


def test_states_of_an_engine() -> None:
    proxy = Proxy()
    gate = proxy.p.gate
    gate.checked("HTTP 503")
    assert state_of_prefill(proxy) == (EngineState.FAILING, "HTTP 503", Verdict.DEGRADED)
    gate.checked("no\nanswer")
    assert state_of_prefill(proxy) == (EngineState.EJECTED, "no answer", Verdict.UNAVAILABLE)
    gate.checked(None)
    assert state_of_prefill(proxy)[0] is EngineState.EJECTED
    gate.checked(None)
    assert state_of_prefill(proxy) == (EngineState.HEALTHY, None, Verdict.OK)
    for _ in range(2):
        gate.requests.ended("silence", NOW)
    why = "2 requests in a row failed there: silence"
    assert state_of_prefill(proxy) == (EngineState.PASSED_OVER, why, Verdict.DEGRADED)
    assert state_of_prefill(proxy, after=60) == (EngineState.HEALTHY, None, Verdict.OK)


def test_the_verdict_counts_engines_that_may_get_requests() -> None:
    proxy = Proxy()
    new = proxy.prefill.engines.add("http://p:2", "test")
    assert proxy.status().roles[0].engines[1].state is EngineState.NEW
    assert proxy.status().verdict is Verdict.DEGRADED
    new.gate.checked(None)
    assert proxy.status().verdict is Verdict.OK
    proxy.prefill.engines.drain(proxy.p)
    assert proxy.status().roles[0].engines[0].state is EngineState.DRAINING
    assert proxy.status().verdict is Verdict.OK, "draining is what the operator wants"
    proxy.prefill.engines.drain(new)
    assert proxy.status().verdict is Verdict.UNAVAILABLE
    proxy.prefill.engines.undrain(new)
    proxy.problems = {"a list": "no\x00such name"}
    assert proxy.status().verdict is Verdict.DEGRADED
    assert proxy.status().problems == ("a list: no such name",)
    proxy.prefill.engines.remove(new)
    proxy.prefill.engines.remove(proxy.p)
    assert proxy.status().verdict is Verdict.UNAVAILABLE


def test_failures_are_the_last_ones_newest_first() -> None:
    proxy = Proxy()
    for number in range(MAX_RECENT + 5):
        proxy.fail(EngineRole.PREFILL, FailureKind.TIMEOUT, reason=f"reason {number}")
    proxy.fail(EngineRole.DECODE, FailureKind.TRANSFER, reason="no grant\nin time " + "x" * 1000)
    proxy.observer.retries[EngineRole.DECODE] += 1
    status = proxy.status()
    assert [failure.number for failure in status.failures] == list(range(MAX_RECENT + 6, 6, -1))
    first, second = status.failures[:2]
    assert (first.role, first.engine, first.kind) == (EngineRole.DECODE, "http://d:1", FailureKind.TRANSFER)
    assert first.reason.startswith("no grant in time xxx")
    assert len(first.reason) < 310
    assert second.reason == f"reason {MAX_RECENT + 4}"
    assert [(role.failures, role.retries) for role in status.roles] == [(MAX_RECENT + 5, 0), (1, 1)]


async def test_phases_of_a_request() -> None:
    request_table = RequestTable(limit=8)

    def only(phase: RequestPhase) -> bool:
        phases = request_table.phases()
        return (
            phases == {each: int(each is phase) for each in RequestPhase}
            and sum(phases.values()) == request_table.in_flight
        )

    proxied = proxied_request()
    with request_table.open(proxied):
        assert only(RequestPhase.ARRIVING)
        with request_table.attempt(proxied):
            assert only(RequestPhase.QUEUED)
            proxied.engine = "http://d:1"
            assert only(RequestPhase.DECODE)
            with Prefill(proxied, 0, ()).running():
                assert only(RequestPhase.PREFILL)
            proxied.prefilled_at = NOW
            assert only(RequestPhase.TRANSFER)
            with Prefill(proxied, 0, ()).running():
                assert only(RequestPhase.PREFILL), "the next prompt's"
        with request_table.attempt(proxied):
            assert only(RequestPhase.QUEUED), "made anew"
            proxied.reply.started = True
            assert only(RequestPhase.ANSWERING)
    assert sum(request_table.phases().values()) == request_table.in_flight == 0
