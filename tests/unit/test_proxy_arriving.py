# SPDX-License-Identifier: Apache-2.0
"""How bodies arrive at the proxy: what is slow to read is refused early, memory is bounded, and bursts are spread."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.proxy.http.arriving import MAX_FIELDS, MAX_MARKS, BodyBudget, HeldBody, Structure, Turns
from vllm_ascend_pd.proxy.http.messages import RequestRefused

texts = st.text(st.sampled_from('a"\\,:[]{}é\n'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def counted(body: bytes, cuts: Iterable[int]) -> tuple[int, int]:
    """Fields and marks of a body that arrives in parts."""
    structure, ends = Structure(), [*sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        structure.feed(body[begin:end])
    return structure.fields, structure.marks


@settings(max_examples=60)
@given(st.dictionaries(texts, values, min_size=1, max_size=6), st.booleans(), st.lists(st.integers(0, 10**6)))
def test_fields_are_counted_wherever_the_body_is_cut(body: dict[str, object], ascii: bool, cuts: list[int]) -> None:
    encoded = json.dumps(body, ensure_ascii=ascii).encode()
    assert counted(encoded, cuts) == counted(encoded, []) == (len(body), counted(encoded, [])[1])


def test_long_strings_and_numbers_have_no_marks() -> None:
    assert counted(b'{"a":"' + b"word, [and] {more}: " * 1000 + b'"}', [7, 500])[1] == 7
    assert counted(b'{"a":[%s]}' % (b"1234567890" * 100), [])[1] == 7


FIELDS = b"{" + b",".join(b'"f%d":0' % number for number in range(30_000)) + b"}"


@pytest.mark.parametrize(
    ("before", "unit", "reason"),
    [
        (b'{"prompt":[', b"11,", "too many values"),
        (b'{"messages":[', b"{},", "too many values"),
        (b'{"prompt":', b"[" * 1000 + b"]" * 1000, "too many values"),
        (b'{"prompt":"', b"\\n", "too many values"),
        (b'{"prompt":', b" ", "too many values"),
        (b"", FIELDS, f"more than {MAX_FIELDS} fields"),
    ],
    ids=["numbers", "messages", "nested lists", "escapes", "spaces", "fields"],
)
def test_what_is_slow_to_read_is_refused_while_it_arrives(before: bytes, unit: bytes, reason: str) -> None:
    """Within 9 MiB, of the 64 MiB that a body may have."""
    structure, parts = Structure(), repeat((unit * (1 + 65536 // len(unit)))[:65536], 3 * MAX_MARKS // 65536 + 1)
    structure.feed(before)
    with pytest.raises(RequestRefused, match=reason) as refused:
        deque(map(structure.feed, parts))
    assert refused.value.status == 400


def test_a_body_may_be_as_large_as_the_room_left_beside_it() -> None:
    """Of clients' three quarters; the last one is for engines' posts."""
    budget, sizes = BodyBudget(1024), (384, 192, 96, 48, 24)
    with budget.hold() as a, budget.hold() as b, budget.hold() as c, budget.hold() as d, budget.hold() as e:
        for held, size in zip((a, b, c, d, e), sizes, strict=True):
            with pytest.raises(RequestRefused, match="does not fit beside those of other requests") as refused:
                budget.add(held, size + 1)
            assert refused.value.status == 503
            budget.add(held, size)
        with budget.hold(for_tickets=True) as ticket:
            budget.add(ticket, 140)
    assert budget.used == 0


def test_bodies_that_are_still_arriving_make_room_for_smaller_ones() -> None:
    budget, ended = BodyBudget(400), list[str]()

    def arriving(held: HeldBody, name: str, size: int) -> None:
        budget.arriving(held, lambda: ended.append(name))
        budget.add(held, size)

    with budget.hold() as large, budget.hold() as complete, budget.hold() as small, budget.hold() as new:
        arriving(large, "large", 100)
        arriving(complete, "complete", 90)
        budget.arriving(complete, None)
        arriving(small, "small", 30)
        arriving(new, "new", 60)
        assert ended == ["large"]
        with pytest.raises(RequestRefused):  # those that are left are smaller, or complete
            budget.add(new, 60)
        assert (ended, budget.used) == (["large"], 180)
    assert budget.used == 0


def test_a_clients_body_takes_no_room_of_an_engines_post() -> None:
    budget, ended = BodyBudget(400), list[str]()
    with budget.hold() as first, budget.hold(for_tickets=True) as ticket, budget.hold() as second:
        for held, name, size in ((first, "first", 50), (ticket, "ticket", 120)):
            budget.arriving(held, partial(ended.append, name))
            budget.add(held, size)
        budget.arriving(second, partial(ended.append, "second"))
        with pytest.raises(RequestRefused):
            budget.add(second, 110)
        assert ended == ["first"]
    assert budget.used == 0


def test_a_burst_begins_in_order_and_a_little_in_each_turn() -> None:
    async def run() -> None:
        turns, begun = Turns(4), list[int]()

        async def request(number: int) -> None:
            await turns.wait()
            begun.append(number)

        requests = [asyncio.create_task(request(number)) for number in range(50)]
        most = 0
        await asyncio.sleep(0)
        requests[20].cancel()
        while len(begun) < 49:
            before = len(begun)
            await asyncio.sleep(0)
            most = max(most, len(begun) - before)
        assert begun == [number for number in range(50) if number != 20]
        assert most == 4
        await turns.wait()

    asyncio.run(run())
