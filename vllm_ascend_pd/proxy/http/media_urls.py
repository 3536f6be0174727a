# SPDX-License-Identifier: Apache-2.0
"""Finds URLs of images, sounds and videos in a client's prompt, and replaces them. All other bytes stay.

vLLM reads such URLs at these places: `image_url`, `audio_url` and `video_url` of a part (a string, or an object with
`url`), and `source` of the Messages API (an object with `type` "url"). Parts are in the `content` of messages, and in
the `content` or `output` of tools' results.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.client_json import Fields

_MAX_DEPTH = 8
"""Lists and objects around a part. A batch of conversations with tools' results has 6."""
_NESTED = ("content", "output")
_URLS = ("image_url", "audio_url", "video_url")

Replace = Callable[[str], str | None]
"""Returns what to put in a URL's place; None leaves it."""


def replace_media_urls(body: bytes, field: str, replace: Replace) -> bytes:
    """Returns `body` with the http(s) URLs of media in its field `field` replaced.

    Calls `replace` for each URL, in their order. Returns the same object if nothing was replaced or the body is not a
    JSON object.
    """
    if b"http" not in body and b"HTTP" not in body:
        return body
    try:
        fields = msgspec.json.decode(body, type=Fields)
        prompt = None if field not in fields else _in_value(fields[field], replace, _MAX_DEPTH)
    except UNREADABLE:
        return body
    return body if prompt is None else msgspec.json.encode({**fields, field: prompt})


def _in_value(value: msgspec.Raw, replace: Replace, depth: int) -> msgspec.Raw | None:
    """Returns a list's or an object's JSON with URLs replaced; None if there is none."""
    text = bytes(value)
    if depth and text.startswith(b"["):
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
        changed = [_in_value(item, replace, depth - 1) for item in items]
        if all(each is None for each in changed):
            return None
        return _raw([old if new is None else new for old, new in zip(items, changed, strict=True)])
    if depth and text.startswith(b"{"):
        fields = msgspec.json.decode(text, type=Fields)
        news = {
            **{name: _in_value(fields[name], replace, depth - 1) for name in _NESTED if name in fields},
            **{name: _in_url(fields[name], replace) for name in _URLS if name in fields},
        }
        if "source" in fields:
            news["source"] = _in_source(fields["source"], replace)
        found = {name: new for name, new in news.items() if new is not None}
        return _raw({**fields, **found}) if found else None
    return None


def _in_url(value: msgspec.Raw, replace: Replace) -> msgspec.Raw | None:
    text = bytes(value)
    if text.startswith(b"{"):
        fields = msgspec.json.decode(text, type=Fields)
        new = _in_url(fields["url"], replace) if bytes(fields.get("url", b"")).startswith(b'"') else None
        return None if new is None else _raw({**fields, "url": new})
    if not text.startswith(b'"'):
        return None
    url = msgspec.json.decode(text, type=str)
    new_url = replace(url) if url.lower().startswith(("http://", "https://")) else None
    return None if new_url is None else _raw(new_url)


def _in_source(value: msgspec.Raw, replace: Replace) -> msgspec.Raw | None:
    text = bytes(value)
    if text.startswith(b"{") and bytes(msgspec.json.decode(text, type=Fields).get("type", b"")) == b'"url"':
        return _in_url(value, replace)
    return None


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
