# SPDX-License-Identifier: Apache-2.0
"""Engines forked from a process that has imported vLLM.

Importing it is most of what starting an engine costs, 10 s of a core and more, and the end-to-end tests start dozens.
What runs in the fork is what `vllm serve` runs, with the arguments and the environment that it would have.
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's own. "fork" has engine cores and workers forked. Where the tests' own environment has it, the API server is,
too, whatever the engine's says."""

_READ_LATE = (
    *("VLLM_", "TMPDIR", "PYTEST_CURRENT_TEST", "CANN_ON_HOST_FIRST_DEVICE", "CANN_ON_HOST_PINNED_ONLY"),
    *("MC_TCP_", "MOONCAKE_CONFIG_PATH", "OTEL_BSP_", "PYTHONHASHSEED"),
)
"""What may differ from the server's environment: prefixes of what nothing reads before it is used. vLLM looks its own
variables up each time, its logging's aside. Mooncake reads its own when its engine or its store starts, OpenTelemetry
when it begins to send spans. vLLM's hashes of blocks follow from PYTHONHASHSEED, which it reads late; Python's own are
the same in all forks."""
_READ_EARLY = ("VLLM_LOGGING", "VLLM_CONFIGURE_LOGGING", "VLLM_PLUGINS")
_IMPORTED = ["imported_by_engines"]  # of tests/plugins, which each engine has on its path
_START_S = 300.0

_context = multiprocessing.get_context("forkserver")
_made_for: dict[str, str] = {}  # the server's environment; empty until it runs


class Prefork:
    """As much of `subprocess.Popen` as `ManagedProcess` needs."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        ready, ours = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_serve, args=(ours, [*command], {**env}, str(log)))
        self._process.start()
        ours.close()
        if not ready.poll(_START_S):
            self._process.kill()
            raise TimeoutError(f"{command[0]} was not forked within {_START_S:.0f} s")
        self.pid: int = ready.recv()
        ready.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether an engine of this environment would be the same if it was forked. The first one's environment is what the
    process that imports vLLM is started with."""
    if os.environ.get(METHOD) != "fork":
        return False
    if not _made_for:
        with mock.patch.dict(os.environ, env):
            _context.set_forkserver_preload(_IMPORTED)
            multiprocessing.forkserver.ensure_running()
        _made_for.update(env)
    differ = {name for name, _ in set(env.items()) ^ set(_made_for.items())}
    return all(name.startswith(_READ_LATE) and not name.startswith(_READ_EARLY) for name in differ)


def _serve(ready: Connection, command: list[str], env: dict[str, str], log: str) -> None:
    """Becomes what `exec` would have made of it, as far as vLLM can tell; what pytest can import, it can, too."""
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    ready.send(os.getpid())
    ready.close()
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    # A tracker of its own: what it has not removed when it ends must not wait for the tests' end.
    tracker = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None
    sys.argv = command
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))

    from vllm.entrypoints.cli.main import main

    try:
        main()
    finally:  # as an interpreter does; a process of multiprocessing ends without the latter
        threading._shutdown()
        atexit._run_exitfuncs()
