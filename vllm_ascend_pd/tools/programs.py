# SPDX-License-Identifier: Apache-2.0
"""Runs programs with a time limit and bounded output, and ends all processes that they start.

What can crash, hang or print as it likes (drivers' tools, other people's native libraries) runs outside this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar

import msgspec

from vllm_ascend_pd.core.text import one_line

MAX_OUTPUT_BYTES = 256 << 10
"""Maximum per stream of a program. `npu-smi info` prints about 10 KiB for 16 chips, a vLLM its options in as much."""

NOT_STARTED = "cannot be started"

_POLL_S = 0.02
_LAST_CHARS = 300
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Report = TypeVar("Report")


@dataclass(frozen=True)
class Ran:
    """The output of a program.

    `problem` is why the output cannot be relied on, or None if the program ended by itself with code 0.
    """

    output: str
    errors: str
    problem: str | None = None

    @property
    def said(self) -> str:
        return f"{self.output}\n{self.errors}".strip()

    def reports(self, kind: type[Report]) -> list[Report]:
        """Returns what a `child` has reported. Ignores an incomplete last line."""
        whole, _, _ = self.output.rpartition("\n")
        return [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]

    @property
    def ending(self) -> str:
        """How it ended, and the end of what it wrote to standard error, as one line."""
        last = one_line(self.errors[-_LAST_CHARS:], _LAST_CHARS)
        return f"the process {self.problem or 'reported nothing'}" + (f" ({last})" if last else "")


def run(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Ran:
    """Runs `command` for at most `timeout_s` seconds. Does not raise if the program fails or is missing.

    `environment`: variables beside those of this process.
    """
    [ran] = run_all([command], timeout_s, environment)
    return ran


def run_all(
    commands: Sequence[Sequence[str]],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    grace_s: float | None = None,
) -> list[Ran]:
    """Runs `commands` at the same time, as `run` does. `grace_s`: time that the others have after one has failed."""
    deadline = time.monotonic() + timeout_s
    late = f"did not end within {timeout_s:g} s and was stopped"
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_Program(command, environment)) for command in commands]
        while running := [program for program in started if program.is_running()]:
            if grace_s is not None and any(program.problem for program in started):
                late = "was stopped because another one had failed"
                deadline, grace_s = min(deadline, time.monotonic() + grace_s), None
            if time.monotonic() >= deadline:
                for program in running:
                    program.stop(late)
            time.sleep(_POLL_S)
        return [program.ran() for program in started]


class _Program:
    """A program in a session of its own. Its whole process group ends with the `with` block."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self.problem: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # Files, because nobody must read them while the program runs.
        self._streams: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - see __exit__
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._streams[0],
                stderr=self._streams[1],
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        except OSError as failure:
            self.problem = f"{NOT_STARTED}: {failure.strerror or failure}"

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for stream in self._streams:
            stream.close()

    def is_running(self) -> bool:
        """Looks at the program. Stops one that prints too much."""
        if self._process is None or self.problem is not None:
            return False
        if any(os.fstat(stream.fileno()).st_size > MAX_OUTPUT_BYTES for stream in self._streams):
            self.stop(f"printed more than {MAX_OUTPUT_BYTES >> 10} KiB and was stopped")
            return False
        code = self._process.poll()
        if code:
            by_itself = f"ended with code {code}"
            self.problem = by_itself if code > 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return code is None

    def stop(self, problem: str) -> None:
        self.problem = problem
        self._kill()

    def ran(self) -> Ran:
        for stream in self._streams:
            stream.seek(0)
        output, errors = (stream.read(MAX_OUTPUT_BYTES).decode(errors="replace") for stream in self._streams)
        return Ran(output, errors, self.problem)

    def _kill(self) -> None:
        if self._process is not None:
            # Also if the leader has ended: its children may still run, and keep the group's number from being reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def child(module: str, *arguments: str) -> list[str]:
    """Returns the command of a Python process that runs `main` of `module`, with this process's import path.

    `main` yields what it reports. `-m` would add the current folder to the path. Run the command in the thread that
    calls this.
    """
    path, name = f"import sys; sys.path[:] = {sys.path!r}", f"{os.getpid()}, {module!r}"
    return [sys.executable, "-c", f"{path}; from {__name__} import run_child; run_child({name})", *arguments]


def run_child(parent: int, module: str) -> None:
    """Runs in a child, which ends with its parent. Its standard output is for reports, as JSON lines."""
    end_with(parent)
    reports = os.dup(1)
    os.dup2(2, 1)  # imports may print
    for report in importlib.import_module(module).main():
        os.write(reports, msgspec.json.encode(report) + b"\n")
    os._exit(0)  # without the libraries' shutdown, which is not checked


def end_with(parent: int) -> None:
    """Lets this process end with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
