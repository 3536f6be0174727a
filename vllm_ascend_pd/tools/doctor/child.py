# SPDX-License-Identifier: Apache-2.0
"""Lets the doctor's child processes report to it, as JSON lines on their standard output.

What can crash, hang or print as it likes (other people's native libraries) runs in children.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from typing import TextIO, TypeVar

import msgspec

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Line = TypeVar("Line", bound=msgspec.Struct)


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `main` of `vllm_ascend_pd.tools.doctor.<module>` with this process's import path.

    `-m` would add the current folder to that path. Call this in the thread that starts the process.
    """
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__package__} import child; child.end_with({os.getpid()}); "
        "child.take_stdout(); "  # because imports may print
        f"from {__package__}.{module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments]


def end_with(parent: int) -> None:
    """Lets this process be killed when its parent ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


@functools.cache
def take_stdout() -> TextIO:
    """Returns this process's standard output for `say`. From then on, all other output goes to standard error."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def say(out: TextIO, line: msgspec.Struct) -> None:
    out.write(msgspec.json.encode(line).decode() + "\n")
    out.flush()


def lines(output: str, kind: type[Line]) -> list[Line]:
    """Parses a child's reports. Ignores an incomplete last line."""
    whole, _, _ = output.rpartition("\n")
    return [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]
