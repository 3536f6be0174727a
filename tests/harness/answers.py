# SPDX-License-Identifier: Apache-2.0
"""Answers of two servers to the same request, compared in everything but what differs from run to run:

- ids and times: the values of `VARYING` fields, as long as both have them;
- how many tokens an event of a stream carries: events of one kind that follow each other are put together;
- in a chat's stream, log probabilities of tokens without text: vLLM leaves them out unless their event has others;
- log probabilities' last digits: float32 sums come out a little different when they are summed in another order;
- `kv_transfer_params`, which a single engine has none of;
- headers that a server writes for itself: about the connection, its request id, and what other origins may see.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import httpx

VARYING = frozenset(
    {
        "id",
        "call_id",
        "item_id",
        "request_id",
        "response_id",
        "created",
        "created_at",
        "completed_at",
        "metrics",
        "sequence_number",
        "system_fingerprint",
    }
)
_OWN_HEADERS = frozenset(
    {"date", "server", "x-request-id", "content-length", "transfer-encoding", "connection", "keep-alive", "vary"}
)
_TOLERANCE = 1e-3
_TRANSFER = "kv_transfer_params"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any
    """JSON; of a stream the list of its events, put together; text of anything else."""
    transfer: dict[str, Any] | None = None
    """Its `kv_transfer_params`, which a single engine has none of."""

    def compared(self) -> dict[str, Any]:
        return {"status": self.status, "headers": self.headers, "body": self.body}


def answer_of(response: httpx.Response) -> Answer:
    """Returns the part of a response that is compared."""
    headers = {name: value for name, value in response.headers.items() if name not in _OWN_HEADERS}
    if "location" in headers:
        headers["location"] = httpx.URL(headers["location"]).path
    if headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(response.status_code, headers, _stream(response.text))
    try:
        body = response.json()
    except ValueError:
        return Answer(response.status_code, headers, response.text)
    transfer = body.pop(_TRANSFER, None) if isinstance(body, dict) else None
    return Answer(response.status_code, headers, body, transfer)


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Returns the differences between two JSON values, each with its place."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{where}.{key}: only in {_side(key in ours)}" for key in sorted(ours.keys() ^ theirs.keys())]
        for key in (ours.keys() & theirs.keys()) - {_TRANSFER}:
            if key not in VARYING:
                found += differences(ours[key], theirs[key], f"{where}.{key}")
            elif type(ours[key]) is not type(theirs[key]):
                found.append(f"{where}.{key}: {ours[key]!r} and {theirs[key]!r}")
        return found
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} and {len(theirs)} entries: {ours!r:.500} and {theirs!r:.500}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for i, (one, other) in pairs for each in differences(one, other, f"{where}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        near = math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        return [] if near else [f"{where}: {ours} and {theirs}"]
    same = type(ours) is type(theirs) and ours == theirs
    return [] if same else [f"{where}: {ours!r:.500} and {theirs!r:.500}"]


def _side(ours: bool) -> str:
    return "ours" if ours else "theirs"


def _stream(text: str) -> list[Any]:
    """Returns a stream's events. Events that carry pieces of one value are joined."""
    whole: list[Any] = []
    for block in re.split(r"\n\n+", text.strip("\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        data = fields.get("data", block)
        event = {"event": fields.get("event"), "data": data if data == "[DONE]" else _with_text(_json(data))}
        last = _same_kind(whole, event)
        if last is None:
            whole.append(event)
        else:
            last["data"] = _joined(last["data"], event["data"])
    return sorted(whole, key=_place)


def _json(data: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


def _with_text(data: Any) -> Any:
    """Returns an event's data without the log probabilities of tokens that have no text."""
    for choice in (data.get("choices") or ()) if isinstance(data, dict) else ():
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            logprobs["content"] = [each for each in logprobs["content"] if each["bytes"] != []]
    return data


def _kind(event: dict[str, Any]) -> Any:
    """Returns the kind of an event, whose events are pieces of one value; None for an event that is complete."""
    data = event["data"]
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("choices"), list):
        return tuple(choice.get("index") for choice in data["choices"])
    kind = str(data.get("type"))
    if kind.endswith("delta") and kind != "message_delta":
        delta = data.get("delta")
        return kind, data.get("index"), delta.get("type") if isinstance(delta, dict) else None
    return None


def _same_kind(events: list[Any], event: dict[str, Any]) -> dict[str, Any] | None:
    kind = _kind(event)
    if kind is None or not events:
        return None
    # Of several choices whichever is computed first comes first.
    candidates = events if isinstance(event["data"].get("choices"), list) else events[-1:]
    return next((each for each in candidates if _kind(each) == kind), None)


def _place(event: dict[str, Any]) -> tuple[int, Any]:
    """A sort key that orders chunks by choice. The sort is stable, so other events stay where they are."""
    data = event["data"]
    if isinstance(data, dict) and isinstance(data.get("choices"), list):
        return (0, _kind(event)) if data["choices"] else (1, ())
    return 2, ()


def _joined(one: Any, more: Any, key: str = "") -> Any:
    """Joins two pieces. Texts and lists are appended. Of other values the later one counts, unless it is null."""
    if isinstance(one, dict) and isinstance(more, dict):
        return {**one, **{name: _joined(one.get(name), value, name) for name, value in more.items()}}
    if isinstance(one, list) and isinstance(more, list):
        if key in ("choices", "tool_calls"):
            by_index = {each["index"]: each for each in one}
            for each in more:
                index = each["index"]
                by_index[index] = _joined(by_index[index], each) if index in by_index else each
            return [*by_index.values()]
        return one + more
    if key in _PIECES and isinstance(one, str) and isinstance(more, str):
        return one + more
    return one if more is None else more


_PIECES = frozenset(
    {"text", "content", "reasoning", "reasoning_content", "arguments", "delta", "partial_json", "thinking"}
)
