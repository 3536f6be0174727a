# SPDX-License-Identifier: Apache-2.0
"""The set-up scripts: which stages are run again, what an interruption leaves, and what the machine lacks."""

import os
import shutil
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


# --- what the machine lacks ---

MACHINE = """\
set -euo pipefail
root=$1 VENV=$1/venv python=$2 pins=pins log=$1/log
source "$root/scripts/stages.sh"
environment() { "$python" -m venv --without-pip "$VENV"; }
missing_packages() { :; }
libraries=(there libc.so.6 outer libouter.so.1)
eval "${MORE:-}"
begin
need_packages "The build pads"
stage environment "environment" pins
add_missing_libraries
"""
APT_GET = """\
echo "${@:3}" >>FOLDER/apt
[[ $3 != install ]] || touch FOLDER/venv/apt/cache/archives/outer.deb
"""
DPKG = 'mkdir -p "$3/usr/lib/here" && cp FOLDER/unpacked/* "$3/usr/lib/here"'


class Machine:
    """One without the library libouter.so.1, which needs libinner.so.1, and with stand-ins for apt-get and dpkg."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(STAGES.parent, folder / "scripts")
        (folder / "pins").touch()
        for name, program in (("apt-get", APT_GET), ("dpkg", DPKG)):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("#!/usr/bin/env bash\n" + program.replace("FOLDER", str(folder)))
            path.chmod(0o755)
        self.unpacked = folder / "unpacked"
        self.unpacked.mkdir()
        for name, needed in (("inner", []), ("outer", ["libinner.so.1"])):
            soname = f"lib{name}.so.1"
            command = ["c++", "-shared", "-x", "c++", "/dev/null", "-x", "none", f"-Wl,--no-as-needed,-soname,{soname}"]
            subprocess.run([*command, *needed, "-o", soname], cwd=self.unpacked, check=True, timeout=60)
        command = [
            "c++",
            "-x",
            "c++",
            "-",
            "-x",
            "none",
            "-Wl,--no-as-needed",
            "libouter.so.1",
            "-o",
            folder / "program",
        ]
        unresolved = "-Wl,--unresolved-symbols=ignore-all"
        subprocess.run(
            [*command, unresolved], cwd=self.unpacked, input="int main() {}", text=True, check=True, timeout=60
        )

    def set_up(self, more: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", MACHINE, "scripts/setup_env.sh", str(self.folder), sys.executable],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PATH": path, "MORE": more} | environment,
        )

    def apt_calls(self) -> list[str]:
        """Since the last time that it was asked."""
        log = self.folder / "apt"
        calls = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return calls

    def loads(self, **environment: str) -> bool:
        """Whether Mooncake, and a program that it starts, find the library that they are linked against."""
        package = self.folder / "wheels/mooncake/__init__.py"
        package.parent.mkdir(parents=True, exist_ok=True)
        program = str(self.folder / "program")
        package.write_text(f"import ctypes, os; ctypes.CDLL('libouter.so.1'); os.execv({program!r}, [{program!r}])")
        command = [str(self.folder / "venv/bin/python"), "-c", "import mooncake"]
        environment = os.environ | {"PYTHONPATH": str(self.folder / "wheels")} | environment
        return subprocess.run(command, capture_output=True, timeout=60, env=environment).returncode == 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_missing_library_is_unpacked_into_the_environment_and_loads_there(machine: Machine) -> None:
    done = machine.set_up()
    assert (done.returncode, done.stderr) == (0, "")
    install = "install --download-only --reinstall --yes --no-install-recommends outer"
    assert machine.apt_calls() == ["update", install]
    assert machine.loads()
    assert machine.set_up().returncode == 0
    assert machine.apt_calls() == []
    # The machine gets the library.
    assert machine.set_up(LD_LIBRARY_PATH=str(machine.unpacked)).returncode == 0
    assert not machine.loads()


def test_an_empty_file_hides_a_library_of_the_machine_but_no_unpacked_one(machine: Machine) -> None:
    """.ci/run has CI unpack libraries that its machine may have."""
    hidden = machine.folder / "hidden"
    hidden.mkdir()
    (hidden / "libouter.so.1").touch()
    path = f"{hidden}:{machine.unpacked}"
    assert machine.set_up(LD_LIBRARY_PATH=path).returncode == 0
    assert machine.apt_calls()
    assert machine.loads(LD_LIBRARY_PATH=path)


def test_without_apt_missing_libraries_are_named(machine: Machine) -> None:
    done = machine.set_up("can_unpack() { false; }")
    assert (done.returncode, machine.apt_calls()) == (1, [])
    assert done.stderr.splitlines()[0] == "setup: missing on this machine: libouter.so.1"


def test_missing_programs_are_named_and_nothing_is_installed(machine: Machine) -> None:
    done = machine.set_up("missing_packages() { echo left-pad; }")
    assert (done.returncode, machine.apt_calls()) == (1, [])
    assert done.stderr.splitlines() == [
        "setup: missing on this machine: left-pad",
        "setup: The build pads.",
        "setup: On Debian, as root: apt-get update && apt-get install --no-install-recommends left-pad",
    ]
