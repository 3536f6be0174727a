# SPDX-License-Identifier: Apache-2.0
"""A client's X-Request-Id in the body of its answer, however the engine's answer is cut into chunks."""

import itertools
import random
import uuid

import pytest

from vllm_ascend_pd.proxy.http.streams import Renaming

ID = "01234567-89ab-4def-8123-456789abcdef"


def renamed(body: bytes, cuts: list[int], name: str = "abc") -> bytes:
    renaming = Renaming.to(name, ID)
    assert renaming is not None
    edges = [0, *sorted(cuts), len(body)]
    parts = [renaming.feed(body[start:stop]) for start, stop in itertools.pairwise(edges)]
    return b"".join([*parts, renaming.end()])


BODY = b'{"id":"chatcmpl-%s","x":"0123-0123","y":"%s%s"}%s' % (ID.encode(), ID.encode(), ID.encode(), ID.encode()[:20])


def test_wherever_a_body_is_cut() -> None:
    expected = BODY.replace(ID.encode(), b"abc")
    for cut in range(len(BODY)):
        assert renamed(BODY, [cut]) == expected
    some = random.Random(1)
    for _ in range(500):
        assert renamed(BODY, some.sample(range(len(BODY)), 12)) == expected


def test_events_are_not_held_back() -> None:
    renaming = Renaming.to("abc", ID)
    assert renaming is not None
    for _ in range(2):
        assert renaming.feed(b'data: {"id":"cmpl-%s"}\n\n' % ID.encode()) == b'data: {"id":"cmpl-abc"}\n\n'


@pytest.mark.parametrize(
    ("given", "written"), [('a"b\\', b'a\\"b\\\\'), ("\xe9", "\u00e9".encode()), ("\x01", b"\\u0001")]
)
def test_a_name_is_written_as_json(given: str, written: bytes) -> None:
    assert renamed(b'{"id":"cmpl-%s"}' % ID.encode(), [], given) == b'{"id":"cmpl-%s"}' % written


def test_names_that_are_not_put_in() -> None:
    assert Renaming.to(ID, ID) is None
    assert Renaming.to("x" * 257, ID) is None
    same = Renaming.to(str(uuid.uuid4()), ID)
    assert same is not None
    assert same.keeps_length
