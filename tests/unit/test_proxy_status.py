# SPDX-License-Identifier: Apache-2.0
"""The status snapshot: all figures, and nothing that a client sent."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import anyio
import msgspec
from hypothesis import given
from hypothesis import strategies as st
from proxied import proxied_request
from starlette.responses import Response

from vllm_ascend_pd.proxy.operate.status import EngineState, Status, Verdict, snapshot
from vllm_ascend_pd.proxy.rendezvous.observer import (
    MAX_RECENT,
    MAX_SAMPLES,
    WINDOW_SECONDS,
    Observer,
    Percentiles,
    RecentSamples,
)
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestPhase, RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadSnapshot

NOW, WALL = 1000.0, 1.8e9
FRESH_SECONDS = 5.0


class Proxy:
    """The parts of a proxy that a snapshot reads: one prefill and one decode engine, each with one good check."""

    def __init__(self, limit: int | None = None) -> None:
        self.prefill, self.decode = (self._pool(role, limit) for role in EngineRole)
        self.request_table = RequestTable(limit=8)
        self.observer = Observer()
        self.problems: list[str] = []
        self.p, self.d = self.prefill.engines.add("http://p:1", "test"), self.decode.engines.add("http://d:1", "test")
        for engine in (self.p, self.d):
            engine.gate.checked(None)

    @staticmethod
    def _pool(role: EngineRole, limit: int | None) -> EnginePool:
        timeouts = {"connect_timeout": 1.0, "read_timeout": 1.0, "fresh_for": FRESH_SECONDS}
        return EnginePool(
            role,
            ConcurrencyLimiter(limit, 4, 1.0),
            strategy="least-load",
            max_connections=1,
            eject_after=2,
            return_after=2,
            **timeouts,
        )

    def fail(
        self, role: EngineRole, kind: FailureKind = FailureKind.LOST, reason: str = "why", unquoted: str | None = None
    ) -> None:
        url = (self.p if role is EngineRole.PREFILL else self.d).url
        self.observer.attempt_failed(role, Failure(kind, reason, url, Response(), unquoted), "0123456789abcdef")

    def status(self, now: float = NOW) -> Status:
        return snapshot(
            (self.prefill, self.decode),
            self.request_table,
            self.observer,
            self.problems,
            version="1",
            now=now,
            wall=WALL,
        )

    def shown(self) -> dict[str, Any]:
        """As the page reads it."""
        return msgspec.json.decode(msgspec.json.encode(self.status()))


def test_idle_proxy() -> None:
    shown = Proxy().shown()
    nothing = {"count": 0, "p50": None, "p90": None, "p99": None}
    assert {name: shown[name] for name in ("version", "time", "verdict", "problems", "failures")} == {
        "version": "1",
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
    assert shown["latency"] == {
        "window_seconds": 600.0,
        "first_token": nothing,
        "prefill": nothing,
        "prefill_to_first_token": nothing,
    }
    assert [role["role"] for role in shown["roles"]] == ["prefill", "decode"]
    [engine] = shown["roles"][0].pop("engines")
    assert shown["roles"][0] == {"role": "prefill", "seats_per_engine": None, "waiting": 0, "retries": 0, "failures": 0}
    assert engine.pop("id").startswith("prefill-")
    assert engine == {
        "url": "http://p:1",
        "state": "healthy",
        "reason": None,
        "draining": False,
        "in_flight": 0,
        "seats_taken": 0,
        "tokens": 0,
        "running": None,
        "queued": None,
        "kv_tokens": None,
        "kv_capacity": None,
    }


def test_shown_load_is_the_load_used_for_routing() -> None:
    proxy = Proxy(limit=3)
    proxy.d.note(LoadSnapshot(running=4, waiting=1, kv_tokens=700, capacity=1000), InFlightLoad(), now=NOW)

    async def run() -> None:
        with ExitStack() as held:
            for _ in range(2):
                assert await proxy.decode.limiter.acquire([proxy.d]) is proxy.d
                held.enter_context(proxy.decode.limiter.releasing(proxy.d))
            held.enter_context(proxy.d.serving(InFlightLoad(requests=2, tokens=50)))
            role = proxy.status().roles[1]
            [engine] = role.engines
            assert (role.seats_per_engine, role.waiting) == (3, 0)
            assert (engine.in_flight, engine.seats_taken, engine.tokens) == (2, 2, 750)
            assert (engine.running, engine.queued, engine.kv_tokens, engine.kv_capacity) == (4, 1, 700, 1000)
            [stale] = proxy.status(NOW + FRESH_SECONDS + 1).roles[1].engines
            assert (stale.running, stale.kv_tokens, stale.tokens) == (None, None, 50)
        [after] = proxy.status().roles[1].engines
        assert (after.in_flight, after.seats_taken) == (0, 0)

    anyio.run(run)


def state_of_prefill(proxy: Proxy, now: float = NOW) -> tuple[EngineState, str | None, Verdict]:
    status = proxy.status(now)
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
        proxy.p.served(False, NOW)
    assert state_of_prefill(proxy) == (EngineState.PASSED_OVER, None, Verdict.UNAVAILABLE)
    assert state_of_prefill(proxy, NOW + 60) == (EngineState.HEALTHY, None, Verdict.OK)


def test_the_verdict_counts_engines_that_may_get_requests() -> None:
    proxy = Proxy()
    new = proxy.prefill.engines.add("http://p:2", "test")
    assert proxy.status().roles[0].engines[1].state is EngineState.UNKNOWN
    assert proxy.status().verdict is Verdict.DEGRADED
    new.gate.checked(None)
    assert proxy.status().verdict is Verdict.OK
    proxy.prefill.engines.drain(proxy.p)
    assert proxy.status().roles[0].engines[0].draining
    assert proxy.status().verdict is Verdict.OK, "draining is what the operator wants"
    proxy.prefill.engines.drain(new)
    assert proxy.status().verdict is Verdict.UNAVAILABLE
    proxy.prefill.engines.undrain(new)
    proxy.problems = ["the engines file: no\x00such file"]
    assert proxy.status().verdict is Verdict.DEGRADED
    assert proxy.status().problems == ("the engines file: no such file",)
    proxy.prefill.engines.remove(new)
    proxy.prefill.engines.remove(proxy.p)
    assert proxy.status().verdict is Verdict.UNAVAILABLE


def test_an_engine_without_a_good_check_is_unknown() -> None:
    proxy = Proxy()
    proxy.prefill.engines.remove(proxy.p)
    proxy.prefill.engines.require_checks()
    new = proxy.prefill.engines.add("http://p:2", "test")
    assert state_of_prefill(proxy) == (EngineState.UNKNOWN, None, Verdict.UNAVAILABLE)
    new.gate.checked("HTTP 503")
    assert state_of_prefill(proxy) == (EngineState.UNKNOWN, "HTTP 503", Verdict.UNAVAILABLE)
    new.gate.checked(None)
    assert state_of_prefill(proxy) == (EngineState.HEALTHY, None, Verdict.OK)


def test_failures_are_the_last_ones_newest_first() -> None:
    proxy = Proxy()
    for number in range(MAX_RECENT + 5):
        proxy.fail(EngineRole.PREFILL, FailureKind.TIMEOUT, reason=f"reason {number}")
    proxy.fail(EngineRole.DECODE, FailureKind.TRANSFER, reason="no grant\nin time " + "x" * 1000)
    proxy.observer.attempt_retried(EngineRole.DECODE)
    status = proxy.status()
    assert [failure.number for failure in status.failures] == list(range(MAX_RECENT + 6, 6, -1))
    first, second = status.failures[:2]
    assert (first.role, first.engine, first.kind) == (EngineRole.DECODE, "http://d:1", FailureKind.TRANSFER)
    assert first.reason.startswith("no grant in time xxx")
    assert len(first.reason) < 310
    assert second.reason == f"reason {MAX_RECENT + 4}"
    assert [(role.failures, role.retries) for role in status.roles] == [(MAX_RECENT + 5, 0), (1, 1)]


def test_client_data_is_not_shown() -> None:
    proxy = Proxy()
    proxy.fail(EngineRole.DECODE, FailureKind.ERROR, reason='HTTP 500: "my prompt" is bad', unquoted="HTTP 500")
    text = msgspec.json.encode(proxy.status())
    assert b"HTTP 500" in text
    assert b"prompt is bad" not in text
    assert b"my prompt" not in text
    assert proxy.status().failures[0].request == "01234567", "the whole id opens the metaserver"


def test_phases_of_a_request() -> None:
    request_table = RequestTable(limit=8)

    def only(phase: RequestPhase) -> bool:
        phases = request_table.phases()
        return (
            phases == {each: int(each is phase) for each in RequestPhase}
            and sum(phases.values()) == request_table.in_flight
        )

    async def run() -> None:
        proxied = proxied_request()
        with request_table.open(proxied):
            assert only(RequestPhase.ARRIVING)
            with request_table.attempt(proxied, lambda: True) as attempt:
                assert only(RequestPhase.QUEUED)
                attempt.engines.append("http://d:1")
                assert only(RequestPhase.DECODE)
                with attempt.prefill():
                    assert only(RequestPhase.PREFILL)
                attempt.prefilled_at = NOW
                assert only(RequestPhase.TRANSFER)
                with attempt.prefill():
                    assert only(RequestPhase.PREFILL), "the next prompt's"
                attempt.answering = True
                assert only(RequestPhase.ANSWERING)
            with request_table.attempt(proxied, lambda: False):
                assert only(RequestPhase.QUEUED), "made anew"
        assert sum(request_table.phases().values()) == request_table.in_flight == 0

    anyio.run(run)


# --- percentiles of the last minutes -------------------------------------------------------------------------


def percentiles(samples: list[float]) -> Percentiles:
    recent = RecentSamples()
    for each in samples:
        recent.add(each, now=0.0)
    return recent.percentiles(0.0)


SECONDS = st.lists(st.floats(0, 1e6), min_size=1, max_size=250)


@given(SECONDS)
def test_a_percentile_is_the_smallest_sample_with_enough_samples_at_or_below_it(samples: list[float]) -> None:
    found = percentiles(samples)
    for part, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value in samples
        assert 100 * sum(sample <= value for sample in samples) >= part * len(samples)
        smaller = [sample for sample in samples if sample < value]
        assert 100 * len(smaller) < part * len(samples)


def test_old_samples_do_not_count() -> None:
    recent = RecentSamples()
    recent.add(9.0, now=0.0)
    recent.add(1.0, now=1.0)
    assert recent.percentiles(WINDOW_SECONDS).count == 2
    assert recent.percentiles(WINDOW_SECONDS + 0.5) == Percentiles(1, 1.0, 1.0, 1.0)
    assert recent.percentiles(WINDOW_SECONDS + 2.0).count == 0


def test_samples_are_bounded_and_the_newest_stay() -> None:
    recent = RecentSamples()
    for number in range(MAX_SAMPLES + 10):
        recent.add(float(number), now=0.0)
    found = recent.percentiles(0.0)
    assert (found.count, found.p50) == (MAX_SAMPLES, 9.0 + MAX_SAMPLES / 2)
