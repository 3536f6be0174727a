# SPDX-License-Identifier: Apache-2.0
"""Server processes that end completely, with every process that they started themselves.

Each runs in a process group of its own. vLLM's workers outlive an API server that was killed, so "ended" means here
that the whole process group is gone. What is still running when Python exits is killed then; call
`interrupt_on_sigterm` to make that hold for SIGTERM too.
"""

import atexit
import contextlib
import itertools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from harness.plain_http import PLAIN_HTTP
from harness.prefork import Prefork

POLL_SECONDS = 0.1
TAIL_LINES = 40

_NOISE = re.compile(
    r"Route: /"  # vLLM lists its dozens of routes
    r'|"GET /(health|metrics) HTTP/[\d.]+" 200'  # the proxy asks every second
    r"|^nanobind: |^ ?- (leaked|\.\.\. skipped) |^See https://nanobind\."  # a library's, at any end in disorder
)
"""Lines that hide what an engine said last."""

_ERROR = re.compile(r" ERROR |Traceback|\] fatal: |Fatal Python error|^terminate called|^F\d{4} ")
"""Python's errors, and those that abort a process: of emulated CANN, faulthandler, C++ and glog."""

_running: "set[ManagedProcess]" = set()


class ManagedProcess:
    """One command in its own process group, its output in a log file."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, forked: bool = False
    ) -> None:
        """`forked`: from a process that has imported vLLM."""
        self.name = name
        self.log = log
        self.command = tuple(command)
        # vLLM leaves sockets in it. The path is short: a Unix socket's name has an end.
        self._temporary = tempfile.TemporaryDirectory(prefix="vllm-")
        env = {**env, "TMPDIR": self._temporary.name}
        self._process = Prefork(command, env, log) if forked else _started(command, env, log)
        self.pid = self._process.pid
        self._shared_memory: set[Path] = set()
        _running.add(self)

    @property
    def exit_code(self) -> int | None:
        """None while the process itself runs; negative for a signal."""
        return self._process.poll()

    def tail(self, lines: int = TAIL_LINES) -> str:
        return "\n".join(self._said()[-lines:])

    def first_error(self, lines: int = TAIL_LINES) -> str:
        """Returns the log from its first error on; empty if it has none."""
        after = itertools.dropwhile(lambda line: not _ERROR.search(line), self._said())
        return "\n".join(itertools.islice(after, lines))

    def account(self) -> str:
        """Returns its log's first error and last lines. vLLM's last lines say that an engine ended, and not why."""
        first = self.first_error()
        where = f"the first error in {self.log}:\n{first}\n\nits end" if first else f"the end of {self.log}"
        return f"{where}:\n{self.tail()}"

    def _said(self) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if not _NOISE.search(line)]

    def members(self) -> list[int]:
        """The living processes of the group, oldest first."""
        return sorted(p.pid for p in psutil.process_iter() if _is_alive_in_group(p, self.pid))

    def signal_group(self, number: int) -> None:
        """Send a signal to every process of the group, if any is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, grace: float = 10) -> None:
        """SIGTERM, up to `grace` seconds, SIGKILL: returns when no process of the group is left.

        Only the leader gets the SIGTERM: a vLLM server shuts its own workers down, in order.
        """
        self.note_shared_memory(self.members())
        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and (self.exit_code is None or self.members()):
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the group. Returns when no process of it is left, nor shared memory that it had open."""
        self.note_shared_memory(self.members())
        while True:
            self.signal_group(signal.SIGKILL)
            if self.exit_code is not None and not self.members():
                break
            time.sleep(0.02)
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        self._temporary.cleanup()
        _running.discard(self)

    def note_shared_memory(self, pids: Iterable[int]) -> None:
        """Notes the shared memory that these processes have open, so that `stop` and `kill` remove it.

        A killed process leaves it behind, and vLLM's tensor-parallel CPU workers always do. Files are found by inode: a
        semaphore's mapping has the name that it was made under, which is not the one that stays.
        """
        inodes = set()
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just ended
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    _, _, _, _, inode, *path = line.split(maxsplit=5)
                    if path and path[0].startswith("/dev/shm/"):
                        inodes.add(int(inode))
        for path in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):  # somebody has just removed it
                if path.stat().st_ino in inodes:
                    self._shared_memory.add(path)


def _started(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # No session of its own: Linux deals the cores out to sessions first (autogroup), and on two of them one was
            # seen to wait for seconds, with all that it had to run, for the threads of another that polled.
            process_group=0,
        )


class StartupError(RuntimeError):
    """A process ended, or took too long, before it was healthy. The message has its account."""

    def __init__(self, process: ManagedProcess, what: str) -> None:
        super().__init__(f"{process.name} {what}; {process.account()}")
        self.summary = f"{process.name} {what}"
        self.log = process.log


def wait_all_healthy(
    urls: Mapping[ManagedProcess, str],
    seconds: float,
    on_healthy: Callable[[ManagedProcess, float], None] = lambda process, elapsed: None,
) -> None:
    """Return once every `GET url` answered 200; raise `StartupError` as soon as one process cannot.

    `on_healthy` is called for each process when it is, with the seconds that it took.
    """
    start = time.monotonic()
    waiting = dict(urls)
    with httpx.Client(timeout=2, **PLAIN_HTTP) as client:
        while True:
            elapsed = time.monotonic() - start
            for process, url in list(waiting.items()):
                if process.exit_code is not None:
                    raise StartupError(process, f"ended with code {process.exit_code} while starting")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(url).status_code == httpx.codes.OK:
                        del waiting[process]
                        on_healthy(process, elapsed)
            if not waiting:
                return
            if elapsed > seconds:
                raise StartupError(next(iter(waiting)), f"was not healthy after {seconds:.0f} s")
            time.sleep(POLL_SECONDS)


def interrupt_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does: through `finally` blocks and exit handlers.

    Also SIGINT, which a shell without job control makes its background jobs ignore, and all that they start.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_alive_in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@atexit.register
def _stop_leftovers() -> None:
    for process in list(_running):
        process.kill()
