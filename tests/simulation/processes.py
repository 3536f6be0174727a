# SPDX-License-Identifier: Apache-2.0
"""Starts the simulation in processes of its own: it changes the product's modules, and needs a fixed hash seed.

Imports take longer than most commands. So commands are forked from one process that has imported everything.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_BEGIN = [sys.executable, "-m", "simulation"]


def run(*arguments: str) -> str:
    """Runs a command of `__main__.py`. Returns what it prints, and raises AssertionError if it fails."""
    server = _server()
    assert server.stdout is not None
    try:
        print(json.dumps(arguments), file=server.stdin, flush=True)
        answer = server.stdout.readline()
    except BaseException:  # a timeout: the next answer would be this command's
        _server.cache_clear()
        os.killpg(server.pid, signal.SIGKILL)
        raise
    assert answer, f"{' '.join(arguments)}: the process that forks has ended"
    code, printed = json.loads(answer)
    assert code == 0, f"{' '.join(arguments)}\n{printed[-20_000:]}"
    return str(printed)


def run_apart(*arguments: str, vllm: Path | None = None) -> str:
    """As `run`, in a process that shares nothing with others, such as the addresses of objects.

    `vllm`: the folder of another vLLM than the installed one.
    """
    done = subprocess.run([*_BEGIN, *arguments], env=_environment(vllm), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-20_000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@functools.cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen(
        [*_BEGIN, "serve"],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdin is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)  # comes before that
    return server


def _environment(vllm: Path | None = None) -> dict[str, str]:
    path = os.pathsep.join(map(str, filter(None, [vllm, _TESTS.parent, _TESTS, os.environ.get("PYTHONPATH")])))
    return {**os.environ, "PYTHONPATH": path}
