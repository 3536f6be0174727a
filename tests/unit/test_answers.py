# SPDX-License-Identifier: Apache-2.0
"""What an engine's answer means: the table, and how answers are told apart."""

import json

import pytest

from vllm_ascend_pd.proxy.routing.answers import RULES, Asks, EngineRole, FailureKind, Then, kind_of, may_refuse

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
def test_how_answers_are_told_apart(
    status: int, content_type: str | None, body: bytes, at_prefill: FailureKind | None, at_decode: FailureKind | None
) -> None:
    assert kind_of(EngineRole.PREFILL, status, content_type, body, well=True) is at_prefill
    assert kind_of(EngineRole.DECODE, status, content_type, body, well=True) is at_decode
    assert may_refuse(status, content_type) or at_prefill is None


def test_a_503_of_an_engine_that_is_not_well_does_not_say_busy() -> None:
    assert kind_of(EngineRole.DECODE, 503, JSON, error(503), well=False) is None
