# SPDX-License-Identifier: Apache-2.0
"""How the doctor's own child processes and the doctor talk: lines of JSON on the child's standard output.

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
    """What runs `main` of `vllm_ascend_pd.tools.doctor.<module>`, with packages found where this process finds them:
    not in whatever folder it was called from, which `-m` would add. Call it in the thread that starts the process."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__package__} import child; child.end_with({os.getpid()}); "
        "child.take_stdout(); "  # importing may print, too
        f"from {__package__}.{module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments]


def end_with(parent: int) -> None:
    """This process is killed when its parent ends, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


@functools.cache
def take_stdout() -> TextIO:
    """This process's standard output, for `say` alone: what anything else prints goes to standard error from the first
    call on."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def say(out: TextIO, line: msgspec.Struct) -> None:
    out.write(msgspec.json.encode(line).decode() + "\n")
    out.flush()


def lines(output: str, kind: type[Line]) -> list[Line]:
    """What a child has said. A last line that was cut is left out."""
    whole, _, _ = output.rpartition("\n")
    return [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]
