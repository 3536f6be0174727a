# SPDX-License-Identifier: Apache-2.0
"""Tells whether a prefill engine's answer is a success, and makes the client's answer where it is not."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.responses import Response

from vllm_ascend_pd.core.metaserver import MAX_REASON_CHARS
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.proxy.http.errors import error_response, excerpt
from vllm_ascend_pd.proxy.rendezvous.retry import Failure
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind


class _TransferResult(msgspec.Struct, frozen=True):
    error: str | None = None
    """Why the transfer failed."""


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: _TransferResult | None = None


def judge(status: int, content_type: str | None, body: bytes, url: str) -> Failure | None:
    """Returns how a prefill failed, or None.

    An HTTP 4xx is the engine's refusal of a bad request, in words for the client, who gets it unchanged. A failed
    transfer comes with HTTP 200.
    """
    if 400 <= status < 500:
        reason = f"HTTP {status} from the prefill engine"
        return Failure(FailureKind.REFUSED, reason, url, Response(body, status_code=status, media_type=content_type))
    if not 200 <= status < 300:
        reason = f"HTTP {status} from the prefill engine"
        return failed(FailureKind.ERROR, f"{reason}: {excerpt(body)}", url)._replace(unquoted=reason)
    try:
        result = msgspec.json.decode(body, type=_PrefillAnswer).kv_transfer_params
    except UNREADABLE as error:
        return failed(FailureKind.GARBAGE, f"the prefill engine's answer is no completion: {error}", url)
    if result is None or result.error is None:
        return None
    return failed(FailureKind.TRANSFER, one_line(result.error, MAX_REASON_CHARS), url)


def failed(kind: FailureKind, reason: str, url: str) -> Failure:
    """A failed prefill. The client gets HTTP 502 with the reason."""
    return Failure(kind, reason, url, bad_gateway(f"prefill failed: {reason}"))


def bad_gateway(message: str) -> Response:
    return error_response(HTTPStatus.BAD_GATEWAY, message)
