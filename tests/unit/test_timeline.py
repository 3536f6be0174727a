# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd timeline` works out, from events with known times."""

import io
import re

import pytest
from rich.console import Console

from vllm_ascend_pd.tools.timeline.command import _table
from vllm_ascend_pd.tools.timeline.read import EventArgs, PromptPart, Recording, TraceEvent
from vllm_ascend_pd.tools.timeline.summary import Request, covered, summarize

T = "t" * 16
UNIX = 1.75e15
"""Traces have unix time, in microseconds."""


def event(cat: str, ph: str, ts: float, dur: float = 0.0, **args: object) -> TraceEvent:
    return TraceEvent(f"{cat} event", ph, UNIX + ts, 1, 1, cat, dur, {}, EventArgs(**args))


def recording(part: str, *events: TraceEvent, rank: int = 0) -> Recording:
    return Recording(EventArgs(part=part, engine="engine", rank=rank), list(events), ())


def prefill_events(transfer: str = T, name: str = "cmpl-1-0") -> list[TraceEvent]:
    """Two layers of 100 us, and 50 us more. Layer 1 is written until 30 us after that, while layer 0 still is."""
    about = {"request": name, "transfer": transfer}
    return [
        event("grant", "b", -50.0),
        event("grant", "e", -30.0, **about, to="0/0", answer="Granted"),
        event("grant", "e", -25.0, **about, to="0/1", answer="GrantRefused"),
        event("grant", "e", -20.0, **about, to="0/1", answer="Granted"),
        event("step", "B", 0.0, parts=(PromptPart(name, transfer, 0, 128),)),
        event("layer", "X", 0.0, 100.0, layer="layers.0"),
        event("grant", "e", 90.0, **about, to="0/0", answer="Granted"),  # a renewal
        event("layer", "X", 100.0, 100.0, layer="layers.1"),
        event("write", "X", 110.0, 100.0, layer="layers.0", to="0/0", written={transfer: 3000}),
        event("step", "E", 250.0),
        event("write", "X", 205.0, 75.0, layer="layers.1", to="0/0", written={transfer: 1000, "o" * 16: 7}),
        event("report", "b", 285.0),
        event("report", "e", 290.0, **about, bytes=4000, early_bytes=3000),
    ]


def decode_events(transfer: str = T, name: str = "cmpl-1-0") -> list[TraceEvent]:
    about = {"request": name, "transfer": transfer}
    return [event("request", "b", -100.0, **about), event("request", "e", 300.0, **about)]


def figures(request: Request) -> list[str]:
    return [*request.figures().values()]


def test_where_the_time_went() -> None:
    recordings = [
        recording("prefill rank", *prefill_events()),
        recording("decode scheduler", *decode_events()),
        recording("decode rank", event("receive", "b", -90.0, request="0-cmpl-1-0-abc", transfer=T)),
    ]
    one, other = summarize(recordings)
    assert one.names == ["cmpl-1-0", "0-cmpl-1-0-abc"]
    assert one.failures == set()
    # Milliseconds: 128 tokens, queue 100 us, to grant 80 us, compute 250 us, push 170 us, push after 30 us.
    assert figures(one) == ["128", "-", "-", "0.1", "0.1", "0.2", "0.2", "0.0", "75%", "0.4"]
    assert one.queue == 100.0
    assert one.granted == UNIX - 20.0
    assert one.computed == [(UNIX, UNIX + 250.0)]
    assert covered(one.written) == 170.0
    assert one.write_end == UNIX + 280.0
    assert one.ready == UNIX + 300.0
    assert other.transfer == "o" * 16
    assert all(one.is_named(name) for name in ("cmpl-1", "0-cmpl-1-0-abc", T))
    assert not one.is_named("mpl-1")


def test_all_ranks_count() -> None:
    """Prefill's second rank begins and grants later, and writes last."""
    later = [
        TraceEvent(e.name, e.ph, e.ts + 40.0, 1, 1, e.cat, e.dur, {}, e.args) for e in prefill_events() if e.cat != "x"
    ]
    ranks = [recording("prefill rank", *prefill_events()), recording("prefill rank", *later, rank=1)]
    [one, _] = summarize([*ranks, recording("decode scheduler", *decode_events())])
    assert one.granted == UNIX + 20.0
    assert (one.compute_begin, one.compute_end) == (UNIX, UNIX + 290.0)
    assert covered(one.written) == 210.0
    assert (one.bytes, one.early_bytes) == (8000, 6000)


def test_what_was_not_seen_is_unknown_not_zero() -> None:
    [one] = summarize([recording("decode scheduler", *decode_events())])
    assert figures(one) == ["-", "-", "-", "-", "-", "-", "-", "-", "-", "0.4"]
    [one, _] = summarize([recording("prefill rank", *prefill_events())])
    assert figures(one) == ["128", "-", "-", "-", "-", "0.2", "0.2", "0.0", "75%", "-"]


def test_a_prompt_that_was_computed_before_decode_took_blocks() -> None:
    about = {"request": "cmpl-1-0", "transfer": T, "tokens": 8000}
    first = [event("first", "b", -900.0, **about), event("first", "e", -400.0, **about)]
    [one] = summarize([recording("decode scheduler", *first, *decode_events())])
    assert figures(one) == ["8000", "0.5", "0.8", "-", "-", "-", "-", "-", "-", "0.4"]
    assert one.window == (UNIX - 900.0, UNIX + 300.0)


def test_failures_of_both_sides_are_said_once() -> None:
    about = {"request": "cmpl-1-0", "transfer": T}
    report = event("report", "e", 1.0, **about, failure="no_grant")
    ended = event("request", "e", 2.0, **about, failure="prefill")
    [one] = summarize(
        [recording("prefill rank", report), recording("prefill rank", report), recording("decode scheduler", ended)]
    )
    assert one.failures == {"no_grant", "decode: prefill"}
    assert one.ready is None


UUIDS = [f"cmpl-{n * 0x1357:08x}-4081-452b-b0c5-59bdae40532d-0" for n in range(1, 12)]


@pytest.mark.parametrize("width", [80, 300])
def test_no_figure_and_no_id_is_cut_off(width: int) -> None:
    requests = [
        Request(
            name,
            [name],
            prompt_tokens=131072,
            issued=0.0,
            granted=12_300.0,
            computed=[(45_600.0, 24_045_600.0)],
            written=[(46_000.0, 24_101_200.0)],
            bytes=1000,
            early_bytes=970,
            ready=24_124_500.0,
            failures={"no_grant"} if name is UUIDS[3] else set(),
        )
        for name in UUIDS
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(_table(requests))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "24124.5" in line]
    assert all(line.split()[1:] == figures(requests[0]) for line in rows)
    ids = re.sub(r" .*", "", re.sub(r"(?m)^ +", "", "\n".join(lines))).replace("\n", "")
    assert all(name in ids for name in UUIDS)
    assert "no_grant" in ids
