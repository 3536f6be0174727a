# SPDX-License-Identifier: Apache-2.0
"""A process that may still run stays recorded on its host: `--stop` finds it by that."""

import queue
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd.tools.launch import node, session
from vllm_ascend_pd.tools.launch.plan import LaunchedProcess, LaunchPlan


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("command", ["exit 3", "exec sleep 60"])
def test_the_record_goes_with_the_last_process(
    command: str, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it ended by itself, or was told to."""
    processes: list[subprocess.Popen[bytes]] = []
    really_end = node.end
    monkeypatch.setattr(node, "end", lambda process, grace: really_end(process, grace) and gone)
    monkeypatch.setattr(node, "_order", lambda seconds: "stop" if command != "exit 3" else processes[0].wait() and None)
    popen = subprocess.Popen

    def start(*args: object, **kwargs: object) -> "subprocess.Popen[bytes]":
        processes.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        return processes[0]

    monkeypatch.setattr(node.subprocess, "Popen", start)
    place = node.Place(tmp_path, "prefill-0")
    node.run(place, ["sh", "-c", command], None, 1.0)
    assert place.record.exists() is not gone
    said = capsys.readouterr().out.splitlines()[-1]
    if command == "exit 3":
        assert f'"gone": {str(gone).lower()}' in said
    else:
        assert ('"stopped"' if gone else '"not stopped"') in said


@pytest.mark.parametrize("gone", ["true", "false"])
def test_a_process_with_something_left_is_stopped_anew(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f'{{"event": "ended", "code": 1, "tail": "", "gone": {gone}}}'
    process = LaunchedProcess("prefill-0", "a", None, (), None)
    plan = LaunchPlan(((process,),), "", (sys.executable, "-c", f"print({said!r})"), "/nowhere", 1.0, 1.0)
    monkeypatch.setattr(session, "stop_anew", lambda plan, process: session.StopOutcome("still runs"))
    one = session.Session(plan, process, queue.SimpleQueue())
    assert one.stop() == (None if gone == "true" else "still runs")
