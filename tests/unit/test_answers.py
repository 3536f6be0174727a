# SPDX-License-Identifier: Apache-2.0
"""What an engine's answer means: the table, how answers are told apart, and the ejection of engines that refuse."""

from __future__ import annotations

import json

import pytest

from vllm_ascend_pd.proxy.routing.answers import RULES, Asks, EngineRole, FailureKind, Then, kind_of, may_refuse
from vllm_ascend_pd.proxy.routing.engine import HealthGate

JSON, HTML = "application/json", "text/html; charset=utf-8"


def error(code: int, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": "no", "type": "T", "param": param, "code": code}}).encode()


def test_each_failure_has_a_row() -> None:
    everything = {(role, kind) for role in EngineRole for kind in FailureKind}
    assert everything - set(RULES) == {
        (EngineRole.PREFILL, FailureKind.PREFILL),
        (EngineRole.PREFILL, FailureKind.NO_PREFILL),
        (EngineRole.DECODE, FailureKind.ABORTED),
    }


def test_r10_a_ticket_that_an_engine_may_have_taken_goes_to_no_other() -> None:
    for kind in FailureKind:
        rule = RULES.get((EngineRole.PREFILL, kind))
        if rule is not None and rule.asks is Asks.NONE:
            assert rule.then in (Then.ANEW, Then.ANEW_OR_DECODE)


@pytest.mark.parametrize(
    ("status", "content_type", "body", "at_prefill", "at_decode"),
    [
        (400, JSON, error(400), FailureKind.REFUSED, FailureKind.REFUSED),
        (401, JSON, b"", FailureKind.DENIED, FailureKind.REFUSED),
        *(
            (status, JSON, error(status), FailureKind.DENIED, FailureKind.DENIED)
            for status in (403, 407, 408, 421, 425)
        ),
        (404, JSON, error(404), FailureKind.REFUSED, FailureKind.REFUSED),
        (404, JSON, error(404, "model"), FailureKind.LACKS_MODEL, FailureKind.LACKS_MODEL),
        (404, JSON, error(400, "model"), FailureKind.REFUSED, FailureKind.REFUSED),
        (404, JSON, b'{"detail":"Not Found"}', FailureKind.REFUSED, FailureKind.REFUSED),
        (413, None, b"\xff", FailureKind.REFUSED, FailureKind.REFUSED),
        (429, None, b"", FailureKind.BUSY, FailureKind.BUSY),
        (503, JSON, error(503), FailureKind.BUSY, FailureKind.BUSY),
        (503, JSON, error(500), None, None),
        (503, JSON, b"{" * 100_000, None, None),
        (503, HTML, error(503), None, None),
        (502, HTML, b"<html>", None, None),
        *((status, HTML, b"<html>", FailureKind.DENIED, FailureKind.DENIED) for status in (200, 302, 400, 404, 429)),
        (200, JSON, b"{}", None, None),
        (500, JSON, error(500), None, None),
    ],
)
def test_f19_how_answers_are_told_apart(
    status: int, content_type: str | None, body: bytes, at_prefill: FailureKind | None, at_decode: FailureKind | None
) -> None:
    assert kind_of(EngineRole.PREFILL, status, content_type, body, well=True) is at_prefill
    assert kind_of(EngineRole.DECODE, status, content_type, body, well=True) is at_decode
    assert may_refuse(status, content_type) or at_prefill is None


def test_f22_a_503_of_an_engine_that_is_not_well_is_no_busy_engines() -> None:
    assert kind_of(EngineRole.DECODE, 503, JSON, error(503), well=False) is None


def test_f19_an_engine_that_refuses_what_others_take_gets_one_request_after_each_pause() -> None:
    gate = HealthGate(eject_after=3, return_after=1)
    assert not gate.refused("HTTP 403", 0.0)
    assert not gate.refused("HTTP 403", 0.0)
    assert not gate.ejected
    assert gate.refused("HTTP 403", 1.0)
    assert (gate.ejected, gate.reason) == (True, "refused 3 requests that others took: HTTP 403")
    gate.checked(None)  # its checks are good all the time
    assert gate.ejected
    assert not gate.refused("HTTP 403", 1.0)  # sent before
    assert not gate.trial_due(10.9)
    assert gate.trial_due(11.0)
    gate.sent(11.0)
    assert not gate.trial_due(12.0)
    gate.refused("HTTP 403", 12.0)
    assert not gate.trial_due(31.9)
    assert gate.trial_due(32.0)
    gate.sent(32.0)
    assert gate.took()
    assert not gate.ejected
    assert not gate.took()


def test_f19_the_pause_is_bounded() -> None:
    gate = HealthGate(eject_after=1, return_after=1)
    now = 0.0
    gate.refused("", now)
    for _ in range(20):
        now += 300.0
        assert gate.trial_due(now)
        gate.sent(now)
        gate.refused("", now)


def test_f19_refusals_count_only_in_a_row() -> None:
    gate = HealthGate(eject_after=2, return_after=1)
    for _ in range(5):
        gate.refused("", 0.0)
        gate.took()
    assert not gate.ejected


def test_f19_no_trial_while_checks_fail() -> None:
    gate = HealthGate(eject_after=1, return_after=1)
    gate.refused("HTTP 403", 0.0)
    gate.checked("HTTP 503")
    assert not gate.trial_due(100.0)
    assert gate.reason == "HTTP 503"
    gate.checked(None)
    assert gate.trial_due(100.0)
    assert gate.ejected
