# SPDX-License-Identifier: Apache-2.0
"""The short form of `scripts/soak.sh`, interrupted and resumed: its own exit code and summary say whether it passed.

A prefill engine is killed in the middle; all answers are compared with a single engine's.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.prefork import METHOD
from harness.waiting import wait_until

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
REQUESTS = 200
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.timeout(1500)


@contextlib.contextmanager
def running(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, str(SOAK), "--requests", str(REQUESTS), "--dir", str(folder), "--sample-seconds", "2"]
    env = os.environ | {METHOD: "fork"}  # engines start sooner
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # stops its engines


def runs(process: psutil.Process) -> bool:
    """An orphan that has ended is a zombie until this machine's init has time for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def finished(folder: Path) -> int:
    results = folder / "results.jsonl"
    return results.read_text().count('"finished"') if results.exists() else 0


def test_soak(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder) as first:
        while finished(folder) < REQUESTS // 10:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.2)
        processes = psutil.Process(first.pid).children(recursive=True)
        assert processes
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate()
    assert first.returncode == 130, output
    assert f"continue with: scripts/soak.sh --requests {REQUESTS} --dir {folder}" in output
    # What engines were forked from sees only then that the soak has ended.
    wait_until(lambda: not any(map(runs, processes)), 30, output)
    assert finished(folder) < REQUESTS

    with running(folder) as second:
        output, _ = second.communicate()
    print(output)
    assert second.returncode == 0, output
    assert "a single instance answers" not in output  # it did already
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["passed"]
    assert summary["right"] + summary["aborted"] + summary["failed"] == summary["requests"] == REQUESTS
    assert summary["right"] > REQUESTS * 0.8
    assert summary["aborted"] > 0
    assert (summary["wrong"], summary["hung"], summary["leaked_blocks"], summary["restarts"]) == (0, 0, 0, 1)
    assert finished(folder) == REQUESTS  # none was asked twice
    logs = "".join(log.read_text(errors="replace") for log in folder.rglob("*.log"))
    assert "KV differs from what prefill computed" not in logs, "verify_kv has found wrong KV"
    assert (folder / "soak.png").read_bytes().startswith(PNG)


def test_wrong_options(tmp_path: Path) -> None:
    for options in (["--requests", "0"], ["--signal", "HUP"], ["--speed", "9"]):
        wrong = subprocess.run([sys.executable, str(SOAK), *options], capture_output=True, text=True, cwd=tmp_path)
        assert wrong.returncode == 2
        assert options[0] in wrong.stderr
    (tmp_path / "something").touch()
    foreign = subprocess.run([sys.executable, str(SOAK), "--dir", str(tmp_path)], capture_output=True, text=True)
    assert foreign.returncode == 2
    assert "--dir" in foreign.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["something"]
