# SPDX-License-Identifier: Apache-2.0
"""Trace files are Chrome's format; device work gets the time at which the device has done it; files and queues have an
end; without `trace_dir` there is none of it."""

import os
import threading
import time
from pathlib import Path

import pytest

from harness.tickets import ticket_with
from harness.timelines import is_chrome_trace
from vllm_ascend_pd.core.observer import TicketIssued
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.device.cpu import CpuEvent
from vllm_ascend_pd.observe.trace_file import Traced, TraceError, TraceFile, moment
from vllm_ascend_pd.observe.traces import decode_scheduler_trace, decode_trace, prefill_trace
from vllm_ascend_pd.tools.timeline.read import read_file, read_folder
from vllm_ascend_pd.tools.timeline.summary import summarize

PROCESS = {"name": "decode scheduler of engine/../x", "part": "decode scheduler", "engine": "engine/../x"}
RANK_INFO = RankInfo("engine", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,))


def instant(n: int) -> Traced:
    return Traced(f"event {n}", "i", "placed", {"tokens": n}, row="prompts")


def numbers(events: list[dict]) -> list[int]:
    return [event["args"]["tokens"] for event in events if event.get("cat") == "placed"]


def test_off_is_decided_once(tmp_path: Path) -> None:
    before = threading.active_count()
    assert prefill_trace(None, RANK_INFO) is decode_trace(None, RANK_INFO) is None
    assert decode_scheduler_trace(None, "engine") is None
    assert threading.active_count() == before


def test_on_makes_a_file_each_with_the_name_of_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    began = time.time()
    makers = (prefill_trace, RANK_INFO), (decode_trace, RANK_INFO), (decode_scheduler_trace, "engine")
    for make, of in makers:
        trace = make(str(folder), of)
        assert trace is not None
        trace.close(5.0)
    names = [is_chrome_trace(path, began)[0]["args"]["name"] for path in sorted(folder.iterdir())]
    assert names == ["decode rank 0/0 of engine", "decode scheduler of engine", "prefill rank 0/0 of engine"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_prompt_that_prefill_computed_before_its_ticket(tmp_path: Path) -> None:
    """The times are in the past when decode takes blocks."""
    trace = decode_scheduler_trace(str(tmp_path), "engine")
    assert trace is not None
    now = time.monotonic()
    trace.on(TicketIssued("r", ticket_with(num_tokens=10), None, 3, (now - 9.0, now - 4.0)))
    trace.close(5.0)
    recordings, problems = read_folder(tmp_path)
    [request] = summarize(recordings)
    assert problems == []
    assert request.prompt_tokens == 10
    assert request.computed_first is not None
    posted, computed = request.computed_first
    assert request.issued is not None
    assert (computed - posted, request.issued - computed) == (pytest.approx(5e6, abs=10), pytest.approx(4e6, abs=3e6))


def work(name: str, end: object, begin: object = 0.0, row: str = "compute") -> Traced:
    return Traced(name, "X", "layer", {}, row=row, begin=begin, end=end, on_stream=True)


def test_work_of_a_stream_ends_when_the_device_has_done_it(tmp_path: Path) -> None:
    """Each piece begins where the one before it ends, or at its begin; streams do not wait for each other."""
    began = time.monotonic()
    file = TraceFile(str(tmp_path), PROCESS)
    first, third, other = CpuEvent(), CpuEvent(), CpuEvent()
    file.put(work("first", first, begin=began))
    file.put(work("second", began))  # known to be over, but its stream's earlier work is not
    file.put(work("third", third))
    file.put(work("other", other, begin=first, row="regroup"))
    time.sleep(0.05)
    first.set()
    time.sleep(0.05)
    other.set()
    third_done_after = time.monotonic()
    time.sleep(0.05)
    third.set()
    file.close(10.0)
    spans = {event["name"]: event for event in is_chrome_trace(file.path, time.time() - 60) if event["ph"] == "X"}
    ends = {name: event["ts"] + event["dur"] for name, event in spans.items()}
    assert 45_000 <= spans["first"]["dur"] < ends["third"] - spans["first"]["ts"]
    assert spans["second"]["ts"] == ends["first"] == ends["second"]
    assert spans["third"]["ts"] == ends["second"]
    assert ends["third"] - spans["first"]["ts"] >= (third_done_after - began) * 1e6
    assert spans["other"]["ts"] == ends["first"]
    assert 45_000 <= spans["other"]["dur"] < spans["third"]["dur"]


def test_work_that_the_device_does_not_do_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps neither what is on other streams nor the close."""
    file = TraceFile(str(tmp_path), PROCESS)
    failed = CpuEvent()
    failed.set(RuntimeError("the device failed"))
    file.put(work("hangs", CpuEvent(), begin=time.monotonic()))
    file.put(work("behind", time.monotonic()))
    file.put(work("failed", moment(failed), begin=moment(failed), row="regroup"))
    began = time.monotonic()
    file.close(0.5)
    assert time.monotonic() - began < 5.0
    names = [event["name"] for event in is_chrome_trace(file.path, time.time() - 60) if event["ph"] == "X"]
    assert names == ["failed"]
    assert "2 events were lost: the device has not done them" in caplog.text


def test_a_file_ends_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    began = time.time()
    file = TraceFile(str(tmp_path), PROCESS, max_bytes=65536)
    for n in range(2000):
        file.put(instant(n))
    file.close(10.0)
    assert file.path.stat().st_size <= 65536
    kept = numbers(is_chrome_trace(file.path, began))
    assert 100 < len(kept) < 2000
    assert kept == list(range(len(kept)))
    problem = "all further events were lost: the file has reached its maximum size"
    assert read_file(file.path).problems == (problem,)
    assert "has reached its maximum size" in caplog.text


def test_events_that_do_not_fit_into_the_queue_are_counted(tmp_path: Path) -> None:
    """Work that waits for the device takes part of the room."""
    file = TraceFile(str(tmp_path), PROCESS, max_queued=100)
    done = CpuEvent()
    for _ in range(60):
        file.put(work("late", done))
    time.sleep(0.3)  # the thread has taken them
    for n in range(5000):
        file.put(instant(n))
    time.sleep(0.3)
    done.set()
    file.close(10.0)
    recording = read_file(file.path)
    kept = sum(event.cat in ("placed", "layer") for event in recording.events)
    assert 100 <= kept < 5060
    assert sum(event.args.lost for event in recording.events) == 5060 - kept
    assert recording.problems[0].endswith("events were lost: they came faster than they are written")


def test_a_full_disk_ends_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(str(tmp_path), PROCESS)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file)
    os.close(full)
    file.put(instant(1))
    file.close(10.0)
    assert "the trace ends here: No space left on device" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(TraceError, match=r"no trace can be written to .*file"):
        TraceFile(str(blocked), PROCESS)
