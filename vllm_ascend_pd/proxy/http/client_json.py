# SPDX-License-Identifier: Apache-2.0
"""Reads a client's request body as an engine does.

An engine uses Python's `json`, which accepts more than JSON: UTF-16, a byte order mark, NaN, lone surrogates. An engine
could read such a body although msgspec cannot, so its fields are checked here before an engine gets it.
"""

from __future__ import annotations

import json
from http import HTTPStatus

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.errors import RequestRefused

Fields = dict[str, msgspec.Raw]

_MAX_OTHER_BYTES = 1024 * 1024
"""The longest body that Python's `json` reads here. It is slow, and the event loop waits for it."""


class ForDecodeAlone(Exception):
    """A request that decode answers without a ticket, in most cases with an error that says what is wrong.

    `body` is for decode. It contains no `kv_transfer_params`."""

    def __init__(self, body: bytes) -> None:
        super().__init__("decode answers this request alone")
        self.body = body


def read_fields(body: bytes) -> Fields:
    """The fields of a body, without `kv_transfer_params`.

    Raises RequestRefused (400) if the client gave `kv_transfer_params`, and ForDecodeAlone if the body is not an object
    or a value is not JSON."""
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except UNREADABLE as error:
        fields = _read_as_python(body, str(error))
    if is_given(fields.pop("kv_transfer_params", None)):
        raise bad_request("kv_transfer_params is set by the proxy, not by clients", "kv_transfer_params")
    return fields


def is_given(value: msgspec.Raw | None) -> bool:
    """Whether a field exists and is not null."""
    return value is not None and bytes(value) != b"null"


def bad_request(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param)


def _read_as_python(body: bytes, why_not: str) -> Fields:
    refused = bad_request(f"the request body is not a JSON object: {why_not}")
    if len(body) > _MAX_OTHER_BYTES:
        raise refused
    try:
        value = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ForDecodeAlone(body) from None
    except (RecursionError, ValueError):  # a limit of this process; an engine may have another one
        raise refused from None
    if not isinstance(value, dict):
        raise ForDecodeAlone(body)
    if value.get("kv_transfer_params") is not None:
        return {"kv_transfer_params": msgspec.Raw(b"{}")}
    try:
        return msgspec.json.decode(json.dumps(value), type=Fields)
    except RecursionError:
        raise refused from None
    except UNREADABLE:
        raise ForDecodeAlone(body) from None
