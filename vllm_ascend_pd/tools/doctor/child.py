# SPDX-License-Identifier: Apache-2.0
"""Children of the doctor: Python processes that report findings on their standard output, as JSON lines."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import msgspec

from vllm_ascend_pd.tools.doctor.report import Finding
from vllm_ascend_pd.tools.programs import Ran

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def reported(ran: Ran) -> list[Finding]:
    """Returns what a child has reported. Ignores an incomplete last line."""
    whole, _, _ = ran.output.rpartition("\n")
    return [msgspec.json.decode(line, type=Finding) for line in whole.splitlines()]


def child(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `main` of `vllm_ascend_pd.tools.doctor.<module>` with this process's import path.

    `-m` would add the current folder to that path. Run the command in the thread that calls this.
    """
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import begin_child; begin_child({os.getpid()}); "
        f"from {__package__}.{module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments]


_reports: list[int] = []  # in a child: the file descriptor for `say`


def begin_child(parent: int) -> None:
    """Lets this process end with its parent, and keeps its standard output for `say`: imports may print."""
    end_with(parent)
    _reports.append(os.dup(1))
    os.dup2(2, 1)


def end_with(parent: int) -> None:
    """Lets this process end with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def say(finding: Finding) -> None:
    """In a child: reports to the doctor."""
    os.write(_reports[0], msgspec.json.encode(finding) + b"\n")
