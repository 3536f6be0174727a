# SPDX-License-Identifier: Apache-2.0
"""What a client gets where an engine gives one answer to every request: the table of answers, row by row, through a
real proxy. tests/unit/test_answers.py has the rules by themselves."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
from engine_standin import INTERNAL_ERROR, DecodeEngine, PrefillEngine, event
from proxy_cluster import STREAM, beside, counted, running_cluster, withheld

from harness.tcp_server import serving
from vllm_ascend_pd.proxy.rendezvous.tickets import REFUSED_BY_PREFILL

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END = b"data: [DONE]\n\n"
INTERNAL = INTERNAL_ERROR["error"]["message"]
SILENT = "prefill rank 1 went silent"
QUICK = {"read_timeout": 0.5, "check_interval": 0.05}
HANGS = {"hangs": True, "metrics": "vllm:prompt_tokens_total 7\n"}
TAKEN = {"transfer_error": "this ticket is being served already"}
WRONG = {"error": {"message": "it is wrong", "param": None}}
ALONE, BESIDE = 1, 2
PREFILL, DECODE = "prefill", "decode"


def refuses(status: int, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"refusal": (status, {"error": {"message": "out of luck"}} if body is None else body)}


class Row(NamedTuple):
    role: str
    """Of the engine that gives the answer."""
    does: dict[str, Any]
    """Its attributes (`engine_standin`)."""
    engines: int
    """Of that role: it alone, or a good one beside it, which is asked second."""
    status: int
    """What the client gets."""
    asked: tuple[int, int, int]
    """Requests that it got, those of the other engine of its role, and those of the other role's engine."""
    prefill: dict[str, int]
    """Failures that are counted."""
    decode: dict[str, int]
    says: str = ""
    """Part of the error's message."""
    settings: Mapping[str, Any] = MappingProxyType({})
    other: Mapping[str, Any] = MappingProxyType({})
    """Attributes of the other role's engine."""
    stream: bool | None = None
    """None: both kinds of requests get the same."""
    never_decode: bool = False
    """Whether the client forbids that decode computes the prompt at last."""


FAILED, LOST = {"transfer failed": 1}, {"connection lost": 1}
TABLE = {
    # Decode fails before the first token: another engine is asked, with a prefill of its own.
    "decode fails inside": Row(DECODE, {"fails": True}, BESIDE, 200, (1, 1, 2), {}, {"server error": 1}),
    "decode answers 503": Row(DECODE, refuses(503), BESIDE, 200, (1, 1, 1), {}, {"server error": 1}),
    "decode breaks off": Row(DECODE, {"breaks_off": True}, BESIDE, 200, (1, 1, 2), {}, LOST, stream=True),
    "decode fails after the role": Row(
        DECODE, {"first_events": [ROLE], "fails": True}, BESIDE, 200, (1, 1, 2), {}, {"server error": 1}, stream=True
    ),
    "decode got no KV": Row(DECODE, {"fails": True, "explains": SILENT}, BESIDE, 200, (1, 1, 2), FAILED, FAILED),
    "decode answers without an answer": Row(
        DECODE, refuses(200, {}), BESIDE, 200, (1, 1, 1), {}, {"unusable answer": 1}
    ),
    "decode attempts are bounded": Row(
        DECODE, {"fails": True}, ALONE, 500, (1, 0, 1), {}, {"server error": 1}, settings={"attempts": 5}
    ),
    # A prefill fails: the next one is for a new request at decode, unless there may be none.
    "prefill answers 500, once": Row(
        PREFILL, refuses(500), BESIDE, 502, (1, 0, 1), {"server error": 1}, {"prefill failed": 1}, "prefill failed: ",
        {"attempts": 1},
    ),
    "prefill hangs, once": Row(
        PREFILL, HANGS, BESIDE, 502, (1, 0, 1), {"timeout": 1}, {"no prefill engine": 1}, "prefill failed: ",
        {"attempts": 1, **QUICK}, stream=False, never_decode=True,
    ),
    "prefill answers 500": Row(PREFILL, refuses(500), BESIDE, 200, (1, 1, 2), {"server error": 1}, FAILED),
    "prefill's transfer fails": Row(PREFILL, TAKEN, BESIDE, 200, (1, 1, 2), FAILED, FAILED),
    "prefill hangs": Row(PREFILL, HANGS, BESIDE, 200, (1, 1, 2), {"timeout": 1}, FAILED, "", QUICK, stream=False),
    "prefill is frozen": Row(
        PREFILL, {"frozen": True}, BESIDE, 200, (1, 1, 2), {"timeout": 1}, FAILED, "", {"probe_timeout": 0.5},
        stream=True,
    ),
    "prefill aborts": Row(PREFILL, {"aborts": 1}, BESIDE, 200, (1, 1, 2), {"aborted": 1}, FAILED, stream=True),
    "the only prefill aborts": Row(PREFILL, {"aborts": 1}, ALONE, 200, (2, 0, 2), {"aborted": 1}, FAILED, stream=False),
    "the only prefill answers 500": Row(
        PREFILL, refuses(500), ALONE, 502, (1, 0, 1), {"server error": 1}, {"prefill failed": 1}
    ),
    "the only prefill's transfer fails": Row(
        PREFILL, TAKEN, ALONE, 503, (2, 0, 3), {"transfer failed": 2}, {**FAILED, "no prefill engine": 2},
    ),
    "the only prefill's transfer fails, decode recomputes": Row(
        PREFILL, TAKEN, ALONE, 200, (1, 0, 1), FAILED, {}, "", {"attempts": 1}, {"recomputes": True}
    ),
    "prefill answers 401": Row(
        PREFILL, refuses(401), ALONE, 502, (1, 0, 1), {"denied": 1}, {"no prefill engine": 1},
        "HTTP 401 from the prefill engine", never_decode=True,
    ),
    "prefill answers 403, decode computes": Row(
        PREFILL, refuses(403), ALONE, 200, (1, 0, 2), {"denied": 1}, {"no prefill engine": 1},
        other={"computes_itself": True},
    ),
    **{
        f"prefill answers {body}": Row(
            PREFILL, refuses(200, body), BESIDE, 200, (1, 1, 2), {kind: 1}, FAILED, stream=False
        )
        for kind, bodies in {
            "unusable answer": ({}, {"choices": []}, {"object": "list"}, {"choices": None}),
            "aborted": ({"usage": {}},),
        }.items()
        for body in bodies
    },
    # The only engine's own error goes to the client. Prefill's says that decode accepted the request.
    **{
        f"decode answers {status}": Row(
            DECODE, refuses(status, WRONG), ALONE, status, (1, 0, 0), {}, failed, "it is wrong"
        )
        for failed, statuses in (({}, (400, 401, 404, 413, 422)), ({"server error": 1}, (503,)))
        for status in statuses
    },
    **{
        f"prefill answers {status}": Row(
            PREFILL, refuses(status, WRONG), ALONE, status, (1, 0, 1), {"refused": 1}, {"refused": 1},
            f"{REFUSED_BY_PREFILL}: it is wrong",
        )
        for status in (400, 404, 413, 422)
    },
    "decode has a reason of its own": Row(
        DECODE, refuses(500, {"error": {"message": "out of luck", "code": 500}}), ALONE, 500, (1, 0, 0), {},
        {"server error": 1}, "out of luck",
    ),
    "decode answers 520 without a reason": Row(
        DECODE, refuses(520, INTERNAL_ERROR), ALONE, 502, (1, 0, 0), {}, {"server error": 1},
        "it failed before it posted any ticket here",
    ),
    "decode answers 529": Row(DECODE, refuses(529), ALONE, 529, (1, 0, 0), {}, {"server error": 1}, "out of luck"),
    "decode streams an unknown status": Row(
        DECODE, {"needs_prefill": False, "first_events": [{"error": {"message": INTERNAL, "code": 529}}]},
        ALONE, 502, (1, 0, 0), {}, {"server error": 1}, stream=True,
    ),
    "decode's error is endless": Row(
        DECODE, refuses(500, {"error": {"message": "x" * 1_500_000}}), ALONE, 500, (1, 0, 0), {}, {"server error": 1},
        "decode engine: HTTP 500 with a body of more than 1048576 bytes",
    ),
    "decode posted no ticket": Row(
        DECODE, {"needs_prefill": False, "fails": True}, ALONE, 500, (1, 0, 0), {}, {"server error": 1},
        "decode engine: it failed before it posted any ticket here: can it reach the metaserver?",
    ),
    "decode got no KV, once": Row(
        DECODE, {"fails": True, "explains": SILENT}, ALONE, 503, (2, 0, 1), FAILED, {"no prefill engine": 2},
        f"{SILENT}; decode did not compute the prompt itself", {"attempts": 1},
    ),
    "decode got no KV, twice": Row(
        DECODE, {"fails": True, "explains": SILENT}, ALONE, 503, (3, 0, 2), {"transfer failed": 2},
        {**FAILED, "no prefill engine": 2}, f"{SILENT}; attempt 2: ",
    ),
}  # fmt: skip
CASES = [
    pytest.param(row, stream, id=f"{name}, {'stream' if stream else 'json'}")
    for name, row in TABLE.items()
    for stream in ((False, True) if row.stream is None else (row.stream,))
]


@pytest.mark.parametrize(("row", "stream"), CASES)
def test_what_follows_from_an_answer(row: Row, stream: bool, request: pytest.FixtureRequest) -> None:
    if "explains" not in row.does:
        request.getfixturevalue("no_reason_comes")
    odd = PrefillEngine() if row.role == PREFILL else DecodeEngine()
    for name, value in row.does.items():
        setattr(odd, name, value)
    cluster_of = beside(**{row.role: odd}, **row.settings) if row.engines == BESIDE else None
    with cluster_of or running_cluster(**{f"{row.role}_engine": odd}, **row.settings) as cluster, ExitStack() as stack:
        stack.callback(setattr, odd, "frozen", False)
        good = getattr(cluster, row.role)
        other = cluster.decode if row.role == PREFILL else cluster.prefill
        for name, value in row.other.items():
            setattr(other, name, value)
        if row.never_decode:
            cluster.client.headers["X-Who-Computes"] = "prefill"
        response = cluster.complete(**(STREAM if stream else {}))
        assert response.status_code == row.status, response.text
        asked = (len(odd.received), len(good.received) if good is not odd else 0, len(other.received))
        assert (asked, *counted(cluster)[1].values()) == (row.asked, row.prefill, row.decode)
        if row.status >= 400:
            assert response.headers["content-type"] == "application/json"
            message = response.json()["error"]["message"]
            assert row.says in message
            assert "127.0.0.1" not in message, "clients do not learn engines' addresses"
        elif stream and row.role == DECODE:
            assert response.content == cluster.decode.expected_stream(cluster.decode.received[-1])
        ids = [each.headers["x-request-id"] for each in (*odd.received, *(good.received if good is not odd else ()))]
        assert len(set(ids)) == len(ids), "each attempt is a request of its own"
        assert odd.frozen or withheld(cluster) == {"prefill": {}, "decode": {}}


# --- answers that vLLM would not send, from other servers at decode's address ------------------------------

SECRET = b"http://10.0.0.7:8100"


def relayed(answer: bytes, path: str = "/v1/completions", stream: bool = False) -> httpx.Response:
    """What a client gets where a decode engine gives this answer to every request."""

    def serve(peer: socket.socket) -> None:
        peer.settimeout(10)
        peer.recv(1 << 20)
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)

    with serving(serve) as port, running_cluster(other_decode=(f"http://127.0.0.1:{port}",), attempts=1) as cluster:
        return cluster.client.post(path, json={"model": "tiny", "prompt": "a", "max_tokens": 8, "stream": stream})


def ok(kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (kind, len(body), body)


@pytest.mark.parametrize(
    ("answer", "stream", "says"),
    [
        (b"HTTP/1.1 600 X\r\nContent-Length: 2\r\n\r\n{}", False, "ConnectionLost: the answer is not valid HTTP"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, "HTTP 204"),
        (b"HTTP/1.1 302 Found\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n" % SECRET, False, "HTTP 302"),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", False, "HTTP 304"),
        (ok(b"text/plain", b"hello from " + SECRET), False, "HTTP 200"),
        (ok(b"text/plain", SECRET * 9000), False, "HTTP 200"),
        (ok(b"application/json", b""), False, "HTTP 200"),
        (ok(b"application/json", b'{"choices": []}'), False, "HTTP 200"),
        (ok(b"application/json", b'{"detail": "%s"}' % (SECRET * 9)), False, "HTTP 200"),
        *(
            (ok(b"text/event-stream", events), True, "its stream ended without an answer")  # as vLLM 0.30 does
            for events in (b"", END, event(ROLE) + END)
        ),
    ],
)
def test_a_success_without_an_answer_is_a_failure(answer: bytes, stream: bool, says: str) -> None:
    """The server's words stay here."""
    response = relayed(answer, stream=stream)
    assert response.status_code == 502
    assert response.json()["error"]["message"].startswith(f"decode engine: {says}")
    assert SECRET.decode() not in f"{response.headers} {response.text}"


def test_a_stream_with_a_content_length() -> None:
    """The client gets an error event when the stream breaks off."""
    token = event({"choices": [{"index": 0, "text": "a"}]})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    response = relayed(head % (len(token) + 10) + token, stream=True)
    assert "content-length" not in response.headers
    assert response.content.startswith(token)
    assert "the answer broke off" in response.text.removeprefix(token.decode())


@pytest.mark.parametrize(("body", "status"), [(b"hello", 502), (b"", 502), (b'{"tokens": [1]}', 200)])
def test_routes_that_decode_answers_alone_answer_in_json(body: bytes, status: int) -> None:
    assert relayed(ok(b"text/plain", body), "/tokenize").status_code == status
