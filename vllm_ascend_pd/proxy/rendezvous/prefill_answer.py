# SPDX-License-Identifier: Apache-2.0
"""Tells whether a prefill engine's answer is a success, and makes the client's answer where it is not."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.responses import Response

from vllm_ascend_pd.core.metaserver import MAX_REASON_CHARS
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.proxy.http.errors import error_response, excerpt
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind, kind_of


class _TransferResult(msgspec.Struct, frozen=True):
    error: str | None = None
    """Why the transfer failed."""


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    output_tokens: int = 0


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: _TransferResult | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    """Tells about answers without `choices`: those of /v1/responses and /v1/messages."""

    @property
    def is_completion(self) -> bool:
        return bool(self.choices) or (self.choices is None and self.usage is not None)

    @property
    def is_aborted(self) -> bool:
        if self.choices is not None:
            return any(choice.finish_reason == "abort" for choice in self.choices)
        return self.usage is not None and self.usage.output_tokens == 0


def judge(status: int, content_type: str | None, body: bytes, url: str) -> Failure | None:
    """Returns how a prefill failed, or None.

    A refusal of a bad request is in words for the client, who gets it unchanged. A failed transfer comes with HTTP 200,
    and so does a prefill that was aborted.
    """
    reason = f"HTTP {status} from the prefill engine"
    kind = kind_of(EngineRole.PREFILL, status, content_type, body, well=False)
    if kind is FailureKind.REFUSED:
        return Failure(kind, reason, url, Response(body, status_code=status, media_type=content_type))
    if kind is not None or not 200 <= status < 300:
        return failed(kind or FailureKind.ERROR, f"{reason}: {excerpt(body)}", url)._replace(unquoted=reason)
    try:
        answer = msgspec.json.decode(body, type=_PrefillAnswer)
    except UNREADABLE as error:
        return failed(FailureKind.GARBAGE, f"the prefill engine's answer is no completion: {error}", url)
    transfer = answer.kv_transfer_params
    if transfer is not None and transfer.error is not None:
        return failed(FailureKind.TRANSFER, one_line(transfer.error, MAX_REASON_CHARS), url)
    if not answer.is_completion:
        return failed(FailureKind.GARBAGE, "the prefill engine's answer is no completion: it has no choices", url)
    if answer.is_aborted:
        return failed(FailureKind.ABORTED, "the prefill engine aborted the request", url)
    return None


def failed(kind: FailureKind, reason: str, url: str) -> Failure:
    """A failed prefill. The client gets HTTP 502 with the reason."""
    return Failure(kind, reason, url, bad_gateway(f"prefill failed: {reason}"))


def bad_gateway(message: str) -> Response:
    return error_response(HTTPStatus.BAD_GATEWAY, message)
