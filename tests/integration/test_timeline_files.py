# SPDX-License-Identifier: Apache-2.0
"""Trace files as real processes write them, killed and not, and the command that reads whatever a folder holds."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.decode_trace import DecodeSchedulerTrace
from vllm_ascend_pd.observe.events import Mark, MarkEvent, TracedProcess
from vllm_ascend_pd.observe.trace_file import TraceError, TraceFile
from vllm_ascend_pd.tools.timeline.command import show_timeline
from vllm_ascend_pd.tools.timeline.merge import merge
from vllm_ascend_pd.tools.timeline.read import read_file, read_folder
from vllm_ascend_pd.tools.timeline.summary import summarize

SCHEDULER = TracedProcess(events.FORMAT, "decode scheduler", "engine/../x", 0, 0, "0" * 16, 0.0)
HOSTILE = "<script>alert(1)</script> </title> @@DATA@@ $x_{y}$ [red]\x1b[31m"

# Traces on and on, and says so once the first events must be in the file.
WRITER = """
import sys, time
from vllm_ascend_pd.observe.events import *
from vllm_ascend_pd.observe.trace_file import TraceFile
file = TraceFile(sys.argv[1], TracedProcess(1, "decode scheduler", "killed", 0, 0, "0" * 16, 0.0), 1 << 26)
n = 0
while True:
    file.put(MarkEvent(name=ISSUED, ph="i", ts=float(n), args=Mark(f"request-{n}", f"{n:016x}")))
    n += 1
    if n == 2000:
        time.sleep(1.0)
        print("written", flush=True)
    if n > 2000:
        time.sleep(0.0001)
"""


def mark(n: int) -> MarkEvent:
    return MarkEvent(name=events.ISSUED, ph="i", ts=float(n), args=Mark(f"request-{n}", f"{n:016x}"))


def test_a_prompt_that_decode_computes_is_marked_and_is_no_transfer(tmp_path: Path) -> None:
    trace = DecodeSchedulerTrace(TraceFile(tmp_path, SCHEDULER, 1 << 20))
    trace.prompt_placed("cmpl-1-0", True, "cheap", 40)
    trace.close(10.0)
    [recording], _ = read_folder(tmp_path)
    [placed] = [event for event in recording.events if isinstance(event, MarkEvent)]
    assert (placed.name, placed.args) == (events.PLACED, Mark("cmpl-1-0", "", "decode: cheap, 40 tokens"))
    assert summarize(merge([recording])) == []


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_ascend_pd.cli", "timeline", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "300"},
    )


def test_a_killed_process_leaves_all_but_its_last_moment(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    [file] = tmp_path.iterdir()
    recording = read_file(file, 1_000_000)
    names = [event.args.request for event in recording.events if isinstance(event, MarkEvent)]
    assert len(names) >= 2000
    assert names == [f"request-{n}" for n in range(len(names))]
    assert [problem for problem in recording.problems if "in the middle" not in problem] == []
    assert file.stat().st_mode & 0o777 == 0o600


def test_all_threads_events_are_written_once(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "new" / "folder"), SCHEDULER, 1 << 24)

    def trace(first: int) -> None:
        for n in range(first, first + 1000):
            file.put(mark(n))
            file.lane(f"lane {n % 3}")

    threads = [threading.Thread(target=trace, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close(10.0)
    recording = read_file(file.path, 1_000_000)
    assert sorted(event.ts for event in recording.events) == [float(n) for n in range(4000)]
    assert set(recording.lanes.values()) == {"decode scheduler 0/0 of engine/../x", "lane 0", "lane 1", "lane 2"}
    assert recording.problems == ()
    assert file.path.parent == tmp_path / "new" / "folder"


def test_a_file_ends_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(str(tmp_path), SCHEDULER, 65536)
    for n in range(2000):
        file.put(mark(n))
    file.close(10.0)
    assert file.path.stat().st_size <= 65536
    recording = read_file(file.path, 1_000_000)
    assert recording.problems == ("all further events were lost: the file has reached its maximum size",)
    assert 100 < len(recording.events) < 2000
    assert "has reached its maximum size" in caplog.text


def test_events_that_do_not_fit_into_the_queue_are_counted(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), SCHEDULER, 1 << 24, queue_events=100)
    for n in range(5000):
        file.put(mark(n))
    time.sleep(0.5)
    file.close(10.0)
    recording = read_file(file.path, 1_000_000)
    kept = sum(isinstance(event, MarkEvent) for event in recording.events)
    [problem] = recording.problems
    assert problem == f"{5000 - kept} events were lost: they came faster than they are written"


def test_a_full_disk_ends_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(str(tmp_path), SCHEDULER, 1 << 24)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._file)
    file.put(mark(1))
    file.close(10.0)
    assert "the trace ends here: No space left on device" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(TraceError, match=r"no trace can be written to .*file"):
        TraceFile(str(blocked), SCHEDULER, 1 << 24)


def a_trace(folder: Path, name: str = "cmpl-1-0") -> Path:
    """A request as a decode scheduler sees it."""
    file = TraceFile(str(folder), SCHEDULER, 1 << 24)
    for what, at in ((events.ISSUED, 1000.0), (events.READY, 5000.0)):
        file.put(MarkEvent(name=what, ph="i", ts=at, args=Mark(name, "0" * 16)))
    file.close(10.0)
    return file.path


def test_broken_files_do_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    whole = a_trace(tmp_path).read_bytes()
    begin, last = whole[: whole.index(b'"request"') - 7], whole.splitlines()[-1]
    cases = {
        "half": whole[:-20],
        "junk": b"[\n" + whole.splitlines()[1] + b"\n\xff\xfe{{{,\n" + last + b"\n",
        "deep": b"[\n" + b"[" * 100_000 + b"\n",
        "long": b"[\n" + b" " * (5 << 20) + b"\n",
        "empty": b"",
        "other": b'{"traceEvents": []}\n',
        "huge": begin + last.replace(b"5000.0", b"1e300") + b"\n",
        "nameless": b"[\n" + last + b"\n",
    }
    for name, content in cases.items():
        (tmp_path / f"events-{name}.json").write_bytes(content)
    os.mkfifo(tmp_path / "events-fifo.json")
    (tmp_path / "events-folder.json").mkdir()
    recordings, problems = read_folder(tmp_path)
    named = {problem.split(":")[0].removeprefix("events-").removesuffix(".json") for problem in problems}
    assert named == {*cases, "fifo", "folder"}
    assert "events-half.json: ends in the middle of line 5, as of a process that was killed" in problems
    assert [len(r.events) for r in recordings if "decode_scheduler" in r.file] == [2]


def test_the_command(tmp_path: Path) -> None:
    a_trace(tmp_path, HOSTILE)
    ran = command(tmp_path, "--html", tmp_path / "page.html", "--png", tmp_path / "picture.png")
    assert ran.returncode == 0, ran.stderr
    assert "4.0   from the ticket until decode could run the request" in ran.stdout
    assert HOSTILE.replace("\x1b", " ") in ran.stdout
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert len(msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]) > 2
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script>") == page.count("</script>") == 1
    assert page.count("</title>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http://" not in page
    assert "https://" not in page
    # What it wrote is not taken for a trace.
    assert command(tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("name", "stem"),
    [("cmpl-1-0", "timeline-cmpl-1-0"), ("../../x", f"timeline-{'0' * 16}"), ("x" * 300, f"timeline-{'0' * 16}")],
    ids=["an id", "a path", "long"],
)
def test_a_chosen_requests_picture_leaves_the_others_alone(tmp_path: Path, name: str, stem: str) -> None:
    a_trace(tmp_path, name)
    before = {path.name for path in tmp_path.iterdir()}
    for already in ("timeline.png", "timeline.html"):
        (tmp_path / already).write_text("of all")
    ran = command(tmp_path, "--request", name)
    assert ran.returncode == 0, ran.stderr
    assert [(tmp_path / already).read_text() for already in ("timeline.png", "timeline.html")] == ["of all"] * 2
    after = {path.name for path in tmp_path.iterdir()}
    assert after - before == {"timeline.png", "timeline.html", "trace.json", f"{stem}.png", f"{stem}.html"}
    assert f"wrote {tmp_path / stem}.png" in ran.stdout
    ran = command(tmp_path, "--request", name, "--png", tmp_path / "mine.png", "--html", tmp_path / "mine.html")
    assert {path.name for path in tmp_path.iterdir()} - after == {"mine.png", "mine.html"}


def test_what_warmed_engines_up_is_left_out(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), SCHEDULER, 1 << 24)
    for n in range(3):
        file.put(MarkEvent(name=events.ISSUED, ph="i", ts=1000.0 * n, args=Mark(f"cmpl-{n}-0", f"{n:016x}")))
    file.close(10.0)
    console = Console(file=io.StringIO(), width=80)
    show_timeline(tmp_path, None, None, None, console, warm_ups=1)
    assert re.findall(r"cmpl-\d-0", console.file.getvalue().split("processes")[0]) == ["cmpl-1-0", "cmpl-2-0"]
    assert "left out" in console.file.getvalue()
    assert "cmpl-0-0" in command(tmp_path).stdout


@pytest.mark.parametrize("name", ["picture", "picture.txt"])
def test_a_picture_is_a_png_whatever_its_name(tmp_path: Path, name: str) -> None:
    a_trace(tmp_path)
    ran = command(tmp_path, "--png", tmp_path / name)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("prepare", "args", "said"),
    [
        (lambda folder: None, (), "has no trace"),
        (lambda folder: (folder / "events-x.json").touch(), (), "none of the 1 files .* is a trace"),
        (a_trace, ("--request", "cmpl-2"), "no request cmpl-2 in .*; requests: 1, such as cmpl-1-0"),
        (a_trace, ("--png", "/proc/none/x.png"), "cannot be written"),
        (lambda folder: folder.rmdir(), (), "is not a folder"),
    ],
    ids=["empty", "no trace", "no such request", "no place", "no folder"],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, prepare, args: tuple[str, ...], said: str) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    prepare(folder)
    ran = command(folder, *args)
    assert ran.returncode == 1
    [line] = ran.stderr.splitlines()
    assert re.search(said, line)


def test_without_matplotlib_there_are_table_and_page(tmp_path: Path) -> None:
    a_trace(tmp_path / "traces")
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    without = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    run = [sys.executable, "-m", "vllm_ascend_pd.cli", "timeline", tmp_path / "traces"]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=120, env=without)
    assert ran.returncode == 0, ran.stderr
    assert "pip install 'vllm-ascend-pd[timeline]'" in ran.stdout
    assert (tmp_path / "traces" / "timeline.html").exists()
    ran = subprocess.run([*run, "--png", tmp_path / "x.png"], capture_output=True, text=True, timeout=120, env=without)
    assert ran.returncode == 1
    assert "pip install 'vllm-ascend-pd[timeline]'" in ran.stderr
