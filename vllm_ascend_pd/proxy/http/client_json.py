# SPDX-License-Identifier: Apache-2.0
"""A client's request body, read as an engine reads it.

An engine uses Python's `json`, which takes more than JSON allows: UTF-16, a byte order mark, NaN, lone surrogates.
What the proxy cannot read, an engine might, so no such body reaches an engine before its fields are checked.
"""

from __future__ import annotations

import json
from http import HTTPStatus

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.errors import RequestRefused

Fields = dict[str, msgspec.Raw]

_MAX_OTHER_BYTES = 1024 * 1024
"""Of a body that is no JSON: Python's `json` takes long, and nothing else runs meanwhile."""


class ForDecodeAlone(Exception):
    """A request that decode answers by itself, without a ticket: in most cases with an error that says what is wrong.

    `body` is what decode gets: it holds no `kv_transfer_params`."""

    def __init__(self, body: bytes) -> None:
        super().__init__("decode answers this request alone")
        self.body = body


def read_fields(body: bytes) -> Fields:
    """The fields of a body, without `kv_transfer_params`.

    Raises RequestRefused (400) for a client that gives `kv_transfer_params`, and ForDecodeAlone for what is no object
    or has a value that is no JSON."""
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except UNREADABLE as error:
        fields = _read_as_python(body, str(error))
    if is_given(fields.pop("kv_transfer_params", None)):
        raise bad_request("kv_transfer_params is set by the proxy, not by clients", "kv_transfer_params")
    return fields


def is_given(value: msgspec.Raw | None) -> bool:
    """Whether a field is there and not null."""
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
    except (RecursionError, ValueError):  # limits of this process: an engine's may be others
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
