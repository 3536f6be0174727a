# SPDX-License-Identifier: Apache-2.0
"""URLs of images, sounds and videos are found where vLLM reads them, and nowhere else; all other bytes stay."""

import json

import pytest

from vllm_ascend_pd.proxy.http.media_urls import replace_media_urls

URL = "https://images.example/a.png"
NEW = "data:application/octet-stream;base64,AA=="


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "text", "text": URL}, *parts]}


def replaced(field: str, value: object) -> tuple[list[str], object]:
    """Returns the URLs found in a body's field, and the field with all of them replaced."""
    found: list[str] = []
    body = json.dumps({"model": "m", field: value, "seed": 7}).encode()
    replace_media_urls(body, field, lambda url: found.append(url))
    after = json.loads(replace_media_urls(body, field, lambda url: NEW))
    assert {name: after[name] for name in ("model", "seed")} == {"model": "m", "seed": 7}
    return found, after[field]


PARTS = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "high"}, "uuid": "1"},
    {"type": "image_url", "image_url": URL},
    {"image_url": URL},
    {"type": "audio_url", "audio_url": {"url": URL}},
    {"type": "video_url", "video_url": {"url": URL}},
    {"type": "input_image", "image_url": URL, "detail": "auto"},
    {"type": "image", "source": {"type": "url", "url": URL}},
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: "-".join(part))
def test_a_part_of_each_kind(part: dict[str, object]) -> None:
    found, after = replaced("messages", [{"role": "system", "content": URL}, user(part), user()])
    assert found == [URL]
    new = json.loads(json.dumps(part).replace(URL, NEW))
    assert after == [{"role": "system", "content": URL}, user(new), user()]


def test_parts_of_batches_and_of_tools_results() -> None:
    part = PARTS[0]
    for field, value in (
        ("messages", [[user(part)], [user(part), user()]]),
        ("messages", [user({"type": "tool_result", "tool_use_id": "1", "content": [PARTS[6]]})]),
        ("input", [user(PARTS[5]), {"type": "function_call_output", "output": [PARTS[5]]}]),
    ):
        found, after = replaced(field, value)
        assert found == [URL] * json.dumps(value).count('_url"' if field == "input" else '"url": "')
        assert json.dumps(after).count(NEW) == len(found)


@pytest.mark.parametrize(
    "value",
    [
        URL,
        [user()],
        [user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})],
        [user({"type": "image_url", "image_url": {"url": "file:///images/a.png"}})],
        [user({"type": "image_url", "image_url": None})],
        [user({"type": "image_url", "image_url": {"url": 7}})],
        [user({"type": "image", "source": {"type": "base64", "data": "http"}})],
        [user({"type": "tool_use", "input": {"image_url": URL}})],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"image_url": URL}}}]}],
    ],
)
def test_nothing_else(value: object) -> None:
    assert replaced("messages", value) == ([], value)


def test_bytes_stay() -> None:
    """Numbers and escapes that a decoder would write differently, and bodies that are no JSON objects."""
    body = b'{"messages":[{"content":[{"image_url":"%b","x":1.50,"y":"\\u0062"}]}],"seed":1e2}' % URL.encode()
    assert replace_media_urls(body, "messages", lambda url: NEW) == body.replace(URL.encode(), NEW.encode())
    for unreadable in (b"http", b'["http"]', b'{"messages": http', body[:-1], b'{"messages":' + b"[" * 5000 + b"http"):
        assert replace_media_urls(unreadable, "messages", lambda url: NEW) is unreadable
    assert replace_media_urls(body, "input", lambda url: NEW) is body
    assert replace_media_urls(body, "messages", lambda url: None) is body
