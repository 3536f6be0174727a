# SPDX-License-Identifier: Apache-2.0
"""How the tests' clients read event streams: a model of random weights generates every character there is."""

import json

import pytest

from harness.client import EventData

DATA = [json.dumps({"text": f"a{c}b"}, ensure_ascii=False) for c in "\u2028\u2029\x85\x1c\x0cü"] + ["[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_lines_end_at_line_feeds_alone(size: int) -> None:
    sent = "".join(f"data: {data}\n\n: a comment\n" for data in DATA).encode()
    events = EventData()
    got = [data for i in range(0, len(sent), size) for data in events.feed(sent[i : i + size])]
    assert got == DATA
