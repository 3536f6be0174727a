# SPDX-License-Identifier: Apache-2.0
"""Clocks, the merge of recordings, and what is worked out from them."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.host_clock import HOST_CLOCK
from vllm_ascend_pd.core.protocol import ClockReading, Granted, GrantRequest, ProtocolError, WriterId, decode
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.clock import measured_offset
from vllm_ascend_pd.observe.events import (
    ClockOffset,
    Finished,
    FinishedEvent,
    Grant,
    GrantEvent,
    Layer,
    LayerEvent,
    Mark,
    MarkEvent,
    Part,
    Push,
    PushEvent,
    Step,
    StepEvent,
    TracedProcess,
)
from vllm_ascend_pd.tools.timeline.merge import align, chrome_trace, merge
from vllm_ascend_pd.tools.timeline.picture import natural, paint
from vllm_ascend_pd.tools.timeline.read import Recording
from vllm_ascend_pd.tools.timeline.summary import Request, chosen, covered, summarize, union

CLOCK = "0" * 16
seconds = st.floats(0, 1e9)


def recording(part: str, clock: str, *said, rank: int = 0, offsets: tuple[ClockOffset, ...] = (), unix: float = 0.0):
    process = TracedProcess(events.FORMAT, part, "engine", 0, rank, clock, unix)
    return Recording(f"{part}{rank}", process, offsets, {}, list(said), ())


@given(
    asked=seconds,
    there=st.floats(0, 10),
    answering=st.floats(0, 10),
    back=st.floats(0, 10),
    apart=st.floats(-1e8, 1e8),
)
def test_the_offset_is_right_within_its_uncertainty(asked, there, answering, back, apart) -> None:
    received = asked + there + apart
    reading = ClockReading(CLOCK, received, received + answering)
    measured = measured_offset(asked, reading, asked + there + answering + back)
    slack = 1e-6 * max(1.0, abs(apart), asked)
    if measured is None:  # only by rounding
        assert there + back <= slack
    else:
        assert abs(measured.offset_us / 1e6 - apart) <= measured.uncertainty_us / 1e6 + slack


@pytest.mark.parametrize(
    ("received", "sent"),
    [(2.0, 1.0), (0.0, 100.0), (math.nan, math.nan), (math.inf, math.inf)],
    ids=["answers before it is asked", "answers for longer than we waited", "no numbers", "endless"],
)
def test_a_reading_that_cannot_be_right_is_not_used(received: float, sent: float) -> None:
    assert measured_offset(1.0, ClockReading(CLOCK, received, sent), 2.0) is None


@pytest.mark.parametrize(
    "clock",
    [("<script>", 1.0, 2.0), (CLOCK, -1.0, 2.0), (CLOCK, 1.0, 1e300), (CLOCK, math.nan, 1.0), ("0" * 17, 1.0, 2.0)],
)
def test_a_peers_clock_is_checked_where_it_is_read(clock: tuple[str, float, float]) -> None:
    fields = dict(zip(("clock", "received_s", "sent_s"), clock, strict=True))
    frame = msgspec.msgpack.encode((1, 1, {"type": "ClockReading", **fields}))
    with pytest.raises(ProtocolError, match="malformed"):
        decode(frame)


def test_engines_without_clocks_understand_those_with_and_the_other_way_round() -> None:
    """Earlier versions exchanged clocks in grants. What they still send there is ignored."""
    request = GrantRequest("0" * 32, "f" * 32, WriterId("p", 0, 0), sharding(1), (0,), 1.0)
    old = {**msgspec.msgpack.decode(msgspec.msgpack.encode(request)), "wants_clock": True}
    assert decode(msgspec.msgpack.encode((1, 7, old))) == (7, request)
    old = {"type": "Granted", "lease_s": 2.0, "clock": (HOST_CLOCK, 1.0, 2.0)}
    assert decode(msgspec.msgpack.encode((1, 7, old))) == (7, Granted(2.0))


def test_clocks_are_aligned_along_the_best_measurements() -> None:
    """P1 has measured D's clock twice; P2 has not measured it, but shares P1's; nobody knows the third host's."""
    far, near = ClockOffset("d" * 16, 5_000.0, 900.0), ClockOffset("d" * 16, 5_100.0, 10.0)
    recordings = [
        recording("prefill rank", "a" * 16, offsets=(far, near)),
        recording("prefill rank", "a" * 16, rank=1),
        recording("decode rank", "d" * 16, unix=100.0),
        recording("prefill rank", "c" * 16, unix=350.0),
    ]
    shifts = align(recordings)
    assert (shifts["d" * 16].us, shifts["d" * 16].uncertainty_us) == (0.0, 0.0)
    assert (shifts["a" * 16].us, shifts["a" * 16].uncertainty_us) == (5_100.0, 10.0)
    assert (shifts["c" * 16].us, shifts["c" * 16].uncertainty_us) == (250.0, None)
    assert "not compared" in merge(recordings).clock_note


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda s: (float(s[0]), float(s[0] + s[1])))))
def test_the_union_of_spans(spans) -> None:
    merged = list(union(spans))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    covers = {n for begin, end in spans for n in range(int(begin), int(end))}
    assert {n for begin, end in merged for n in range(int(begin), int(end))} == covers
    assert covered(spans) == len(covers)


def a_request(transfer: str = "t" * 16, name: str = "cmpl-1-0") -> list[Recording]:
    """P's clock is 1000 us behind D's. Two layers of 100 us, and 50 us more; layer 1 is pushed until 30 us after."""
    part = Part(name, transfer, 0, 128)
    p = [
        GrantEvent(name="grant", ts=-50.0, dur=20.0, args=Grant(name, transfer, "0/0", "Granted")),
        GrantEvent(name="grant renewed", ts=150.0, dur=20.0, args=Grant(name, transfer, "0/0", "Granted")),
        LayerEvent(name="compute 0", ts=0.0, dur=100.0, args=Layer(1, "layers.0")),
        LayerEvent(name="compute 1", ts=100.0, dur=100.0, args=Layer(1, "layers.1")),
        StepEvent(name="step 1", ts=0.0, dur=250.0, args=Step(1, (part,))),
        PushEvent(name="push 0", ts=110.0, dur=60.0, args=Push("layers.0", "0/0", {transfer: 3000})),
        PushEvent(name="push 1", ts=205.0, dur=75.0, args=Push("layers.1", "0/0", {transfer: 1000})),
        FinishedEvent(name="finished", ph="i", ts=285.0, args=Finished(name, transfer, 0, 4000, 3000, "")),
    ]
    d = [
        MarkEvent(name=events.ISSUED, ph="i", ts=900.0, args=Mark(name, transfer)),
        MarkEvent(name=events.READY, ph="i", ts=1300.0, args=Mark(name, transfer)),
    ]
    offset = ClockOffset("d" * 16, 1000.0, 1.0)
    return [recording("prefill rank", "a" * 16, *p, offsets=(offset,)), recording("decode scheduler", "d" * 16, *d)]


def test_where_the_time_went() -> None:
    [one] = summarize(merge(a_request()))
    assert one.names == ["cmpl-1-0"]
    assert one.prompt_tokens == 128
    assert (one.queue, one.to_grant, one.compute) == (100.0, 70.0, 250.0)
    assert (one.push, one.push_after, one.early_share, one.to_ready) == (135.0, 30.0, 0.75, 400.0)
    assert one.failures == []


def test_what_was_not_seen_is_unknown_not_zero() -> None:
    [one] = summarize(merge(a_request()[1:]))
    assert (one.compute, one.push, one.push_after, one.early_share, one.queue) == (None,) * 5
    assert one.prompt_tokens is None
    assert one.to_ready == 400.0


def test_a_request_is_found_by_any_of_its_names() -> None:
    requests = [Request("aa", ["cmpl-1", "cmpl-1-abc"]), Request("bb", ["cmpl-2"])]
    assert [chosen(requests, name) for name in ("cmpl-1-abc", "bb", "cmpl")] == [requests[:1], requests[1:], []]
    assert chosen(requests, None) == requests


def test_the_picture_shows_the_request_and_all_its_bytes() -> None:
    timeline = merge(a_request() + a_request("u" * 16, "other"))
    requests = summarize(timeline)
    one = next(request for request in requests if request.transfer == "t" * 16)
    picture = paint(timeline, requests, one)
    assert [row.kind for row in picture.rows] == ["compute", "push", "compute", "push", "request"]
    assert [bar.mine for bar in picture.rows[0].bars] == [True] * 3
    assert [bar.mine for bar in picture.rows[2].bars] == [False] * 3
    assert [arrival.share for arrival in picture.arrivals] == [0.75, 1.0]
    assert picture.begin < one.compute_begin < one.end < picture.end


def test_layers_are_sorted_by_number() -> None:
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.1.attn", "mtp"]
    assert sorted(names, key=natural) == [names[2], names[1], names[0], names[3]]


def test_the_merged_file_is_what_chrome_opens() -> None:
    merged = msgspec.json.decode(msgspec.json.encode(chrome_trace(merge(a_request()))))
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {1}
    assert min(event["ts"] for event in merged["traceEvents"] if event["ph"] != "M") == 0.0
    assert all({"name", "ph", "ts", "dur", "pid", "tid"} <= event.keys() for event in spans)
    names = [event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"]
    assert names == ["prefill rank 0, engine", "decode scheduler, engine"]
