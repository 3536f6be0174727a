# SPDX-License-Identifier: Apache-2.0
"""Trace files as real processes write them, killed and not, and the command that reads whatever a folder holds."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from harness.timelines import is_chrome_trace
from vllm_ascend_pd import cli
from vllm_ascend_pd.observe.trace_file import Traced, TraceFile
from vllm_ascend_pd.tools.timeline.command import show_timeline
from vllm_ascend_pd.tools.timeline.read import read_file, read_folder

SCHEDULER = {"name": "decode scheduler of engine", "part": "decode scheduler", "engine": "engine"}
HOSTILE = "<script>alert(1)</script> </title> $x_{y}$ [red]\x1b[31m"

# Traces on and on, and says so once the first events must be in the file.
WRITER = """
import sys, time
from vllm_ascend_pd.observe.trace_file import Traced, TraceFile
file = TraceFile(sys.argv[1], {"name": "decode scheduler of x", "part": "decode scheduler", "engine": "x"})
n = 0
while True:
    args = {"request": f"request-{n}", "transfer": f"{n:016x}"}
    file.put(Traced("a request", "b", "request", args, id=args["transfer"]))
    n += 1
    if n == 2000:
        time.sleep(1.0)
        print("written", flush=True)
    if n > 2000:
        time.sleep(0.0001)
"""


def command(*args: str | Path) -> Result:
    """Without a process of its own: tests/e2e/test_timeline.py starts one."""
    return CliRunner().invoke(cli.app, ["timeline", *map(str, args)], env={"COLUMNS": "300"})


def shown(folder: Path, wanted: str | None = None, warm_ups: int = 0) -> str:
    """What the command prints."""
    console = Console(file=io.StringIO(), width=300)
    show_timeline(folder, wanted, console, warm_ups)
    return console.file.getvalue()


def a_trace(folder: Path, *names: str) -> Path:
    """Requests as a decode scheduler sees them: each takes 4 ms."""
    file = TraceFile(str(folder), SCHEDULER)
    now = time.monotonic()
    for n, name in enumerate(names or ("cmpl-1-0",)):
        args = {"request": name, "transfer": f"{n:016x}"}
        for ph, at in (("b", now - 1 + 0.1 * n), ("e", now - 1 + 0.1 * n + 0.004)):
            file.put(Traced(name, ph, "request", args, id=args["transfer"], end=at))
    file.close(10.0)
    return file.path


def test_a_killed_process_leaves_all_but_its_last_moment(tmp_path: Path) -> None:
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    [file] = tmp_path.iterdir()
    recording = read_file(file)
    names = [event.args.request for event in recording.events if event.ph == "b"]
    assert len(names) >= 2000
    assert names == [f"request-{n}" for n in range(len(names))]
    assert [problem for problem in recording.problems if "in the middle" not in problem] == []
    if not recording.problems:  # killed between two writes, as almost always
        assert len(is_chrome_trace(file, began, closed=False)) == len(recording.events)


def test_broken_files_do_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    whole = a_trace(tmp_path).read_bytes()
    first, last = whole.splitlines()[1], whole.splitlines()[-2]
    cases = {
        "half": whole[:-20],
        "junk": b"[\n" + first + b"\n\xff\xfe{{{,\n" + last + b"\n",
        "deep": b"[\n" + b"[" * 100_000 + b"\n",
        "long": b"[\n" + b" " * (5 << 20) + b"\n",
        "empty": b"",
        "other": b'{"traceEvents": []}\n',
        "huge": b"[\n" + first + b"\n" + re.sub(rb'"ts":\d+', b'"ts":1e300', last) + b"\n",
        "nameless": b"[\n" + last + b"\n",
    }
    for name, content in cases.items():
        (tmp_path / f"events-{name}.json").write_bytes(content)
    os.mkfifo(tmp_path / "events-fifo.json")
    (tmp_path / "events-folder.json").mkdir()
    recordings, problems = read_folder(tmp_path)
    named = {problem.split(":")[0].removeprefix("events-").removesuffix(".json") for problem in problems}
    assert named == {*cases, "fifo", "folder"}
    assert "events-half.json: ends in the middle of line 4, as of a process that was killed" in problems
    assert sorted(len(recording.events) for recording in recordings) == [1, 2, 2, 3]


def test_the_command(tmp_path: Path) -> None:
    """Names come from clients: they are text in the table and the picture."""
    a_trace(tmp_path, HOSTILE)
    ran = command(tmp_path)
    assert ran.exit_code == 0, ran.stderr
    row, _ = [line for line in ran.stdout.splitlines() if HOSTILE.replace("\x1b", " ") in line]
    assert row.split()[-1] == "4.0"
    assert f"wrote {tmp_path}/timeline.png, a picture of request <script>" in ran.stdout
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    # What it wrote is not taken for a trace.
    assert command(tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir() if "events-" not in path.name} == {"timeline.png", "trace.json"}


def test_merged_traces_are_one_trace(tmp_path: Path) -> None:
    """Processes of several hosts may have the same number. No event is lost or changed otherwise."""
    began = time.time() - 2
    files = [a_trace(tmp_path, f"cmpl-{n}-0") for n in range(3)]
    for file in files:
        file.write_text(re.sub(r'"pid":\d+', '"pid":1', file.read_text()))
    shown(tmp_path)
    merged = is_chrome_trace(tmp_path / "trace.json", began)
    numbers = {event["pid"] for event in merged}
    assert len(numbers) == 3
    singles = [event for file in files for event in json.loads(file.read_text())]
    key = lambda event: (event["ts"], event["ph"], json.dumps(event["args"], sort_keys=True))  # noqa: E731
    assert sorted(map(key, merged)) == sorted(map(key, singles))


def test_a_request_is_chosen_by_its_id_or_how_it_begins(tmp_path: Path) -> None:
    a_trace(tmp_path, "cmpl-1-0", "cmpl-2-0", "cmpl-21-0")
    for wanted, names in (("cmpl-1-0", ["cmpl-1-0"]), ("cmpl-2", ["cmpl-2-0", "cmpl-21-0"])):
        assert re.findall(r"cmpl-\d+-0", shown(tmp_path, wanted).split("wrote")[0]) == names


def test_what_warmed_engines_up_is_left_out(tmp_path: Path) -> None:
    a_trace(tmp_path, "cmpl-0-0", "cmpl-1-0", "cmpl-2-0")
    text = shown(tmp_path, warm_ups=1)
    assert re.findall(r"cmpl-\d-0", text.split("wrote")[0]) == ["cmpl-1-0", "cmpl-2-0"]
    assert "left out" in text
    assert "cmpl-0-0" in shown(tmp_path)


def test_clocks_that_differ_are_said(tmp_path: Path) -> None:
    a_trace(tmp_path)
    assert "clocks differ" not in shown(tmp_path)
    file = TraceFile(str(tmp_path), {"name": "prefill rank 0/0 of p", "part": "prefill rank", "engine": "p"})
    part = {"request": "cmpl-1-0", "transfer": "0" * 16, "start": 0, "stop": 9}
    for ph, at in (("B", -100.0), ("E", -99.0)):
        end = time.monotonic() + at
        file.put(Traced("step 1", ph, "step", {"parts": [part]}, row="compute", end=end, on_stream=True))
    file.close(10.0)
    assert "hosts' clocks differ" in shown(tmp_path)


def a_trace_and_no_room(folder: Path) -> None:
    a_trace(folder)
    (folder / "timeline.png").mkdir()


@pytest.mark.parametrize(
    ("prepare", "args", "said"),
    [
        (lambda folder: None, (), "has no trace"),
        (lambda folder: (folder / "events-x.json").touch(), (), "none of the 1 files .* is a trace"),
        (a_trace, ("--request", "cmpl-2"), "no request cmpl-2 in .*; requests: 1, such as cmpl-1-0"),
        (a_trace_and_no_room, (), "timeline.png cannot be written"),
        (lambda folder: folder.rmdir(), (), "is not a folder"),
    ],
    ids=["empty", "no trace", "no such request", "no place", "no folder"],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, prepare, args: tuple[str, ...], said: str) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    prepare(folder)
    ran = command(folder, *args)
    assert ran.exit_code == 1
    [line] = ran.stderr.splitlines()
    assert re.search(said, line)


def test_without_matplotlib_there_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_trace(tmp_path / "traces")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = command(tmp_path / "traces")
    assert ran.exit_code == 0, ran.stderr
    assert "cmpl-1-0" in ran.stdout
    assert "pip install matplotlib" in ran.stdout
    assert (tmp_path / "traces" / "trace.json").exists()
