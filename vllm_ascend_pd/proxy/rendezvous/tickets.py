# SPDX-License-Identifier: Apache-2.0
"""Reads the tickets that decode engines post, and says what prefill's answers to them mean. No I/O."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.responses import JSONResponse, Response

from vllm_ascend_pd.core.protocol import MAX_FAILURE_CHARS
from vllm_ascend_pd.core.text import UNREADABLE, is_name, one_line
from vllm_ascend_pd.proxy.http.messages import error_response, excerpt
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind, kind_of

REFUSED_BY_PREFILL = (
    "prefill refuses what decode has accepted, so the engines may have been started with different options"
)
"""Begins prefill's own message."""


class _Prompt(msgspec.Struct, frozen=True):
    adapter: str = ""


class TicketHeader(msgspec.Struct, frozen=True):
    """The fields of a ticket that the proxy reads. Raises ValueError for names that cannot be logged."""

    request_id: str
    """The decode engine's name for its request."""
    remote_engine_id: str
    """The decode engine's id."""
    ticket_id: str = ""
    """Empty for tickets of other connectors."""
    prompt: _Prompt | None = None
    """What decides the prompt's KV. None if the ticket does not tell it."""
    ticket_follows: bool = False
    """Whether this is an intent: decode has no blocks yet, and wants to know where prefill holds the prompt."""
    replaces: str = ""
    """The id of an earlier ticket of the same request, whose transfer has ended. Decode lost the KV again, by a
    preemption for instance. So this ticket is for the prompt and all tokens generated since. Empty for first ones."""

    @property
    def is_for_base_model(self) -> bool:
        """Whether the request uses no adapter, by whatever name the client called the model."""
        return self.prompt is not None and not self.prompt.adapter

    def __post_init__(self) -> None:
        if not (is_name(self.request_id) and is_name(self.remote_engine_id)):
            raise ValueError("request_id or remote_engine_id is too long or has unprintable characters")


class ParsedTicket(NamedTuple):
    """A ticket as the decode engine posted it, taken apart."""

    header: TicketHeader
    encoded: bytes
    """The ticket as prefill gets it: byte for byte, without the token ids."""
    token_ids: msgspec.Raw | None = None
    """The prompt's token ids as an encoded JSON list: a Python int takes more memory than its digits."""


_HEADER = ("request_id", "remote_engine_id", "ticket_id", "prompt", "ticket_follows", "replaces")
"""Fields of `TicketHeader`."""
_DIGIT_RUN = bytes.maketrans(b"123456789" + bytes({*range(256)} - {*b"0123456789,[]"}), b"0" * 9 + b"x" * 243)
_TOO_LONG = b"0" * 10
"""Token ids have at most 9 digits."""


def read_ticket(body: bytes) -> ParsedTicket:
    """Reads a posted ticket. Raises msgspec.DecodeError, or another error of `UNREADABLE`, if it is none."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    # Not from the body itself: a large one would be read twice.
    header_fields = msgspec.json.encode({name: fields[name] for name in _HEADER if name in fields})
    header = msgspec.json.decode(header_fields, type=TicketHeader)
    if not header.ticket_id:  # another connector's ticket: its engines use all of it
        return ParsedTicket(header, body)
    token_ids = fields.pop("token_ids", None)
    if token_ids is None or not _are_token_ids(token_ids):
        return ParsedTicket(header, body)
    return ParsedTicket(header, msgspec.json.encode(fields), token_ids)


def _are_token_ids(ids: msgspec.Raw) -> bool:
    """Whether this is a list of numbers that is not empty. Raises msgspec.ValidationError if it is anything else.

    It is JSON already, so its bytes tell. To decode a million numbers takes longer, and more memory than the text.
    """
    text = bytes(ids).translate(_DIGIT_RUN, b" \t\r\n")
    if not text.startswith(b"[") or text.rfind(b"[") > 0 or b"x" in text or _TOO_LONG in text:
        raise msgspec.ValidationError("Expected a list of token ids - at `$.token_ids`")
    return text != b"[]"


class _TransferResult(msgspec.Struct, frozen=True):
    error: str | None = None
    """Why the transfer failed."""
    refused: bool = False
    """Whether the engine refuses the ticket, or the prompt for it."""


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    output_tokens: int = 0


class _Choices(msgspec.Struct, frozen=True, array_like=True):
    """A list. Only its first entry is read: prefill is asked for one."""

    first: _Choice | None = None


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: _TransferResult | None = None
    choices: _Choices | None = None
    usage: _Usage | None = None
    """Tells about answers without `choices`: those of /v1/responses and /v1/messages."""

    @property
    def is_completion(self) -> bool:
        if self.choices is not None:
            return self.choices.first is not None
        return self.usage is not None

    @property
    def is_aborted(self) -> bool:
        if self.choices is not None:
            return self.choices.first is not None and self.choices.first.finish_reason == "abort"
        return self.usage is not None and self.usage.output_tokens == 0


def failure_of(status: int, content_type: str | None, body: bytes, url: str) -> Failure | None:
    """Returns how a prefill failed, or None.

    A failed transfer comes with HTTP 200, and so does a prefill that was aborted.
    """
    reason = f"HTTP {status} from the prefill engine"
    kind = kind_of(EngineRole.PREFILL, status, content_type, body, well=False)
    if kind is FailureKind.REFUSED:
        return Failure(kind, reason, url, _refusal(status, content_type, body))
    if kind is not None or not 200 <= status < 300:
        other = FailureKind.ERROR if status >= 500 else FailureKind.GARBAGE
        return failed(kind or other, f"{reason}: {excerpt(body)}", url)._replace(unquoted=reason)
    try:
        answer = msgspec.json.decode(body, type=_PrefillAnswer)
    except UNREADABLE as error:
        return failed(FailureKind.GARBAGE, f"the prefill engine's answer is no completion: {error}", url)
    transfer = answer.kv_transfer_params
    if transfer is not None and transfer.error is not None:
        kind = FailureKind.TICKET if transfer.refused else FailureKind.TRANSFER
        return failed(kind, one_line(transfer.error, MAX_FAILURE_CHARS), url)
    if not answer.is_completion:
        return failed(FailureKind.GARBAGE, "the prefill engine's answer is no completion: it has no choices", url)
    if answer.is_aborted:
        return failed(FailureKind.ABORTED, "the prefill engine aborted the request", url)
    return None


class _Held(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def answer_to_intent(body: bytes) -> Response:
    """Returns what decode is told of a prefill that has succeeded: where the prompt is held. `body`: prefill's."""
    held = msgspec.json.decode(body, type=_Held).kv_transfer_params
    return Response(msgspec.json.encode({"status": "ok", "kv_transfer_params": held}), media_type="application/json")


def _refusal(status: int, content_type: str | None, body: bytes) -> Response:
    """Returns prefill's own error for the client. Its message also says that the fault may be an engine's.

    Decode has accepted the request, so prefill may lack an option of vLLM, such as the one for prompt embeddings.
    """
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
        error = msgspec.convert(answer["error"], dict[str, Any])
        message = msgspec.convert(error["message"], str)
    except (*UNREADABLE, KeyError):
        return Response(body, status_code=status, media_type=content_type)
    return JSONResponse({**answer, "error": {**error, "message": f"{REFUSED_BY_PREFILL}: {message}"}}, status)


def failed(kind: FailureKind, reason: str, url: str) -> Failure:
    """A failed prefill. The client gets HTTP 502 with the reason."""
    return Failure(kind, reason, url, error_response(HTTPStatus.BAD_GATEWAY, f"prefill failed: {reason}"))
