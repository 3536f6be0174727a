# SPDX-License-Identifier: Apache-2.0
"""Pure decisions: which engine is asked next, and what a stream's beginning shows."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response

from vllm_ascend_pd.proxy.http.streams import Events, Opening, error_of, opening, split_errors
from vllm_ascend_pd.proxy.routing.answers import (
    MAX_UNDELIVERED,
    RULES,
    EngineRole,
    Failure,
    FailureKind,
    engines_to_avoid,
    lacks_prefill,
)

URLS = ("a", "b", "c")
DECODE_KINDS = [kind for role, kind in RULES if role is EngineRole.DECODE]


def failure(kind: FailureKind, url: str = "a") -> Failure:
    return Failure(kind, "why", url, Response())


@pytest.mark.parametrize("role", EngineRole)
@pytest.mark.parametrize(
    ("urls", "failures", "attempts", "avoid"),
    [
        ("ab", [failure(FailureKind.ERROR)], 2, {"a"}),
        ("ab", [failure(FailureKind.LOST)], 2, {"a"}),
        ("ab", [failure(FailureKind.ERROR)], 1, None),
        ("ab", [failure(FailureKind.ERROR), failure(FailureKind.ERROR, "b")], 2, None),
        ("ab", [failure(FailureKind.ERROR), failure(FailureKind.ERROR, "b")], 5, None),
        ("ab", [failure(FailureKind.ERROR), failure(FailureKind.LOST, "b")], 5, {"a"}),
        ("ab", [failure(FailureKind.LOST), failure(FailureKind.LOST, "b")], 5, set()),
        ("ab", [failure(FailureKind.LOST), failure(FailureKind.ERROR)], 5, {"a"}),
        ("ab", [failure(FailureKind.REFUSED)], 2, None),
        ("ab", [failure(FailureKind.ERROR), failure(FailureKind.REFUSED, "b")], 5, None),
        ("a", [failure(FailureKind.ERROR)], 2, None),
        ("a", [failure(FailureKind.UNREACHABLE)], 2, None),
        ("a", [failure(FailureKind.LOST)], 2, set()),
        ("a", [failure(FailureKind.LOST), failure(FailureKind.LOST)], 2, None),
        ("a", [failure(FailureKind.LOST), failure(FailureKind.ERROR)], 5, None),
    ],
)
def test_which_engine_is_asked_next(urls, failures, attempts, avoid, role) -> None:
    assert engines_to_avoid(role, urls, failures, attempts) == avoid


@pytest.mark.parametrize(
    ("urls", "failures", "attempts", "follows"),
    [
        ("a", [], 2, True),
        ("a", [], 1, False),
        ("", [], 2, False),
        ("a", [failure(FailureKind.TRANSFER)], 3, True),
        ("a", [failure(FailureKind.TRANSFER)], 1, False),
        ("a", [failure(FailureKind.TRANSFER)] * 2, 2, True),
        ("a", [failure(FailureKind.TRANSFER)] * 3, 2, False),
        ("a", [failure(FailureKind.TRANSFER)] * 5, 7, True),
        ("ab", [failure(FailureKind.TRANSFER), failure(FailureKind.ERROR)], 2, False),
        ("a", [failure(FailureKind.ERROR)], 3, False),
        ("ab", [failure(FailureKind.ERROR)], 3, True),
    ],
)
def test_whether_another_attempt_may_follow(urls, failures, attempts, follows) -> None:
    """Beside the attempt in flight, as it turns out if that fails through no fault of its own engine."""
    for url in ("", urls[-1:]):
        also = [*failures, failure(FailureKind.TRANSFER, url)]
        assert (engines_to_avoid(EngineRole.DECODE, urls, also, attempts) is not None) is follows


def test_an_engine_gets_a_new_request_again_only_after_what_may_have_been_an_accident() -> None:
    prefill, decode = EngineRole.PREFILL, EngineRole.DECODE
    again = {(role, kind) for role, kind in RULES if engines_to_avoid(role, "a", [failure(kind)], 2) is not None}
    anew = (FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.ABORTED, FailureKind.TRANSFER)
    anew = (*anew, FailureKind.TICKET, FailureKind.INTERRUPTED)
    assert again == {*((prefill, kind) for kind in anew), (decode, FailureKind.LOST), (decode, FailureKind.TRANSFER)}


@pytest.mark.parametrize(
    ("urls", "failed", "attempts", "follows"),
    [
        ("abc", "a", 1, False),
        ("abc", "ab", 2, True),
        ("abc", "abc", 2, False),
        ("a", "a", 2, True),
        ("a", "aa", 2, False),
        ("abcdef", "abc", 2, True),
        ("abcdef", "abcd", 2, False),
        ("abcdef", "abcd", 5, True),
    ],
)
def test_a_prompt_whose_transfers_fail_is_prefilled_at_further_engines(urls, failed, attempts, follows) -> None:
    """Also beyond the allowed attempts, because nothing is known against the prompt."""
    failures = [failure(FailureKind.TRANSFER, url) for url in failed]
    assert (engines_to_avoid(EngineRole.PREFILL, urls, failures, attempts) is not None) is follows


@given(
    st.lists(st.sampled_from(URLS), min_size=1, unique=True),
    st.lists(st.tuples(st.sampled_from(DECODE_KINDS), st.sampled_from(URLS)), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_some_engine_is_always_left(urls: list[str], failed: list[tuple[FailureKind, str]], attempts: int) -> None:
    failures = [failure(kind, url) for kind, url in failed]
    avoid = engines_to_avoid(EngineRole.DECODE, urls, failures, attempts)
    if avoid is not None:
        assert set(urls) - avoid
        transfers = attempts > 1 and all(each.kind is FailureKind.TRANSFER for each in failures)
        assert len(failures) < (max(attempts, MAX_UNDELIVERED) if transfers else attempts)


@pytest.mark.parametrize(
    ("kinds", "lacks"),
    [
        ([], False),
        ([FailureKind.NO_ENGINE], True),
        ([FailureKind.UNREACHABLE], True),
        ([FailureKind.UNREACHABLE] * 3, True),
        ([FailureKind.LOST], True),
        ([FailureKind.TIMEOUT], True),
        ([FailureKind.LOST, FailureKind.UNREACHABLE], True),
        ([FailureKind.ERROR, FailureKind.UNREACHABLE], True),
        ([FailureKind.UNREACHABLE, FailureKind.LOST], True),
        ([FailureKind.LOST, FailureKind.LOST], False),
        ([FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.NO_ENGINE], False),
        ([FailureKind.UNREACHABLE, FailureKind.ERROR], False),
        ([FailureKind.TRANSFER], True),
        ([FailureKind.TRANSFER] * 4, True),
        ([FailureKind.TICKET] * 2, True),
        ([FailureKind.LOST, FailureKind.TRANSFER], True),
        ([FailureKind.LOST, FailureKind.INTERRUPTED, FailureKind.TRANSFER], False),
        ([FailureKind.TRANSFER, FailureKind.ERROR], False),
        ([FailureKind.INTERRUPTED], False),
        ([FailureKind.FULL], False),
        ([FailureKind.REFUSED], False),
        ([FailureKind.BUSY], False),
        ([FailureKind.ABORTED], False),
        ([FailureKind.LACKS_MODEL], True),
        ([FailureKind.DENIED], True),
        ([FailureKind.ERROR, FailureKind.DENIED], True),
        ([FailureKind.UNREACHABLE, FailureKind.FULL], False),
    ],
)
def test_whether_no_prefill_engine_is_there(kinds, lacks) -> None:
    assert lacks_prefill([failure(kind) for kind in kinds]) is lacks


# --- streams ----------------------------------------------------------------------------------------------


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def piece(**choice: Any) -> bytes:
    return event({"choices": [{"index": 0, **choice}]})


ROLE = piece(delta={"role": "assistant", "content": ""}, finish_reason=None)
ERROR = event({"error": {"message": "Internal server error", "code": 500}})


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (b"", Opening.NOTHING),
        (b": ping\n\n", Opening.NOTHING),
        (ROLE, Opening.NOTHING),
        (piece(text="", finish_reason=None), Opening.NOTHING),
        (event({"choices": [], "usage": {}}), Opening.NOTHING),
        (ROLE + piece(delta={"content": "a"}), Opening.CONTENT),
        (piece(delta={"reasoning_content": "a"}), Opening.CONTENT),
        (piece(delta={"tool_calls": [{}]}), Opening.CONTENT),
        (piece(text="a"), Opening.CONTENT),
        (piece(text="", token_ids=[7]), Opening.CONTENT),
        (piece(text="", finish_reason="length"), Opening.CONTENT),
        (b"data: [DONE]\n\n", Opening.NOTHING),
        (b"data: {not json\n\n", Opening.CONTENT),
        (b"data: \xff\n\n", Opening.CONTENT),
        (ERROR, Opening.FAILED),
        (ROLE + ERROR, Opening.FAILED),
        (event({"error": "what"}), Opening.FAILED),
        (piece(text="a") + ERROR, Opening.CONTENT),
        (event({"error": {"message": "bad", "code": 400}}), Opening.CONTENT),
    ],
)
def test_the_beginning_of_a_stream_shows_content_or_failure(events: bytes, says: Opening) -> None:
    assert opening(events) is says


def test_error_of() -> None:
    status, body = error_of(ROLE + ERROR)
    assert (status, json.loads(body)) == (500, {"error": {"message": "Internal server error", "code": 500}})
    with pytest.raises(ValueError, match="no error"):
        error_of(ROLE)


def test_errors_are_found_among_other_events() -> None:
    quoted = piece(text='data: {"error": 1}')
    assert split_errors(quoted + ROLE) == [(quoted + ROLE, 0)]
    assert split_errors(quoted + ERROR + b"data: [DONE]\n\n") == [
        (quoted, 0),
        (ERROR, 500),
        (b"data: [DONE]\n\n", 0),
    ]


@given(st.lists(st.integers(1, 60)))
def test_whole_events_come_out_whatever_the_chunks(cuts: list[int]) -> None:
    stream = ROLE + piece(text="a") + ERROR + b"data: [DO"
    events, out, rest = Events(limit=1000), b"", stream
    for size in [*cuts, len(stream)]:
        part = events.feed(rest[:size])
        rest = rest[size:]
        assert not part or part.endswith(b"\n\n")
        out += part
    assert out + events.rest() == stream
    assert events.rest() == b""


def test_an_overlong_event_passes_uncut() -> None:
    events = Events(limit=10)
    assert events.feed(b"data: 12") == b""
    assert events.feed(b"345") == b"data: 12345"
    assert events.rest() == b""
