# SPDX-License-Identifier: Apache-2.0
"""Stages of the set-up scripts: which are run again, and what an interruption leaves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.waiting import wait_until

STAGES = Path(__file__).resolve().parents[2] / "scripts" / "stages.sh"

SETUP = f"""\
set -euo pipefail
root=$1 VENV=$1/venv python=$2 pins=pins log=$1/log
source {STAGES}
work() {{ eval "$WORK"; }}
begin
stage work "the work" pins
echo "made by $python"
"""


def _as_from_a_terminal() -> None:
    """Whoever runs the tests in the background, or with nohup, has these ignored by all that they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a set-up of one stage, in a process group of its own as a terminal's jobs are."""
    (tmp_path / "pins").write_text("a==1\n")
    started: list[subprocess.Popen[str]] = []

    def start(work: str, python: str = sys.executable) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["bash", "-c", SETUP, "setup", str(tmp_path), python],
            preexec_fn=_as_from_a_terminal,
            env=os.environ | {"WORK": work},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def said(process: "subprocess.Popen[str]") -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    return output


def test_a_stage_whose_inputs_change_is_run_again(start: Start, tmp_path: Path) -> None:
    for content, again in (("a==1\n", True), ("a==1\n", False), ("a==2\n", True)):
        (tmp_path / "pins").write_text(content)
        assert ("the work ..." in said(start("true"))) is again


def test_the_first_error_ends_a_stage(start: Start, tmp_path: Path) -> None:
    process = start("echo tried; false; echo went on")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines() == ["tried", f"setup: the work failed; everything it printed: {tmp_path}/log"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_is_no_failure_and_ends_what_runs(
    number: signal.Signals, code: int, start: Start, tmp_path: Path
) -> None:
    process = start(f"sleep 60 & echo $! >{tmp_path}/pid; echo noise; wait")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), timeout_s=30)
    begun = time.monotonic()
    process.send_signal(number)  # to bash alone, as `kill` or a service manager
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert (process.returncode, errors) == (code, "\nsetup: interrupted; run it again to go on\n")
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()
    assert "the work ..." in said(start("true"))


MACHINE = f"""\
set -euo pipefail
root=$1 VENV=$1/venv python=$2 pins=pins log=$1/log
install_system_packages=$3
source {STAGES}
missing_packages() {{ [[ -e $root/installed ]] || echo left-pad; }}
install_packages "the build pads"
"""


def install_packages(folder: Path, asked: bool) -> tuple["subprocess.CompletedProcess[str]", list[str]]:
    """As root on Debian. Returns also the calls of apt-get, which installs what it is told to."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "scripts").mkdir()
    log = folder / "apt"
    log.touch()
    for name, program in (
        ("id", "echo 0"),
        ("apt-get", f'echo "$*" >>{log}; [[ $1 != install ]] || touch {folder}/installed'),
    ):
        (programs / name).write_text(f"#!/usr/bin/env bash\n{program}\n")
        (programs / name).chmod(0o755)
    command = ["bash", "-c", MACHINE, "scripts/setup_env.sh", str(folder), sys.executable, "1" if asked else ""]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return done, log.read_text().splitlines()


def test_root_is_told_what_is_missing_and_nothing_is_installed(tmp_path: Path) -> None:
    done, calls = install_packages(tmp_path, asked=False)
    assert (done.returncode, calls) == (1, [])
    assert done.stderr.splitlines() == [
        "setup: missing on this machine: left-pad",
        "setup: the build pads.",
        "setup: On Debian, as root: apt-get update && apt-get install --no-install-recommends left-pad",
        "setup: or, as root: scripts/setup_env.sh --install-system-packages",
    ]


def test_packages_are_installed_when_that_is_asked_for(tmp_path: Path) -> None:
    done, calls = install_packages(tmp_path, asked=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert calls == ["update", "install --yes --no-install-recommends left-pad"]
