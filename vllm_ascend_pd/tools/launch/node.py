# SPDX-License-Identifier: Apache-2.0
"""The agent on each host: starts, watches and stops one process. tools/launch/cluster.py runs it over ssh.

`run` prints events of the process to standard output, one JSON object per line (`started`, `ready`, `detached`,
`ended`, ...). It reads orders from standard input: `stop`, or `detach`, which leaves the process running. The end of
standard input means `stop`, because the launcher has gone. `stop` finds a process that another `run` has started by its
file in the state folder.

Uses only the standard library, so that it starts fast on any host.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.2
PROBE_SECONDS = 2.0
TAIL_LINES = 40
TAIL_BYTES = 16 << 10


class NodeError(RuntimeError):
    """Ends the program with its message."""


@dataclass(frozen=True)
class Running:
    """A started process and its time of start. The id alone may belong to another process later."""

    pid: int
    start_ticks: int

    def is_it(self) -> bool:
        """Whether this id still belongs to that process, or to its zombie."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot, or None if it does not exist."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def members(group: int) -> list[int]:
    """Returns the running processes of a process group, without zombies."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := _stat(int(entry))) is not None:
            state, its_group = fields[0], int(fields[2])
            if its_group == group and state not in "ZX":
                found.append(int(entry))
    return found


def _stat(pid: int) -> list[str] | None:
    """Returns /proc/PID/stat from the third field on. The second one, the command's name, may have any characters."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def end(process: Running, grace: float) -> bool:
    """Sends SIGTERM to the first process, which ends its children. After `grace` seconds, sends SIGKILL to its group.

    Returns whether all have ended. Takes at most 2 * `grace` + 5 seconds.
    """
    _signal(process.pid, signal.SIGTERM, group=False)
    _wait(process, grace)
    _signal(process.pid, signal.SIGKILL, group=True)
    return _wait(process, grace + 5)


def _wait(process: Running, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(process.pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS / 2)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return True


def _signal(pid: int, number: int, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


@dataclass(frozen=True)
class Place:
    """The paths of a process's files: its log, its id, and a lock that its agent holds."""

    folder: Path
    name: str

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.json"

    def running(self) -> Running | None:
        """The process that was started last, if any of its group lives."""
        try:
            running = Running(**json.loads(self.record.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        # The first one may have ended before the others: its number is not given to a new process before they end.
        return running if (running.is_it() or start_ticks(running.pid) is None) and members(running.pid) else None

    def write(self, running: Running) -> None:
        temporary = self.record.with_suffix(".new")
        temporary.write_text(json.dumps(vars(running)))
        temporary.replace(self.record)

    def tail(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])


def is_ready(url: str) -> bool:
    """Whether `GET url` is answered 200 (`http://`), or connections are taken (`tcp://`)."""
    try:
        if url.startswith("tcp://"):
            parts = urllib.parse.urlsplit(url)
            socket.create_connection((parts.hostname, parts.port), PROBE_SECONDS).close()
            return True
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment
        with opener.open(url, timeout=PROBE_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def say(event: str, **more: object) -> None:
    """Prints one event to the launcher. If it has gone, standard input ends, too."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"event": event, **more}), flush=True)


def run(place: Place, command: Sequence[str], ready: str | None, grace: float) -> int:
    """Starts the process and watches it until it has ended or is detached."""
    place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (place.folder / f"{place.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NodeError(f"{place.name} is already being started or watched: stop that cluster first") from None
        if (other := place.running()) is not None:
            raise NodeError(f"{place.name} already runs as process {other.pid}: stop that cluster first")
        with place.log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise NodeError(f"{place.name} cannot be started: {error}") from None
        running = Running(process.pid, start_ticks(process.pid) or 0)
        place.write(running)
        say("started", pid=process.pid, log=str(place.log))
        return _watch(place, process, running, ready, grace)


def _watch(place: Place, process: subprocess.Popen[bytes], running: Running, ready: str | None, grace: float) -> int:
    if ready is None:
        say("ready")
    waiting_for = ready
    while True:
        order = _order(POLL_SECONDS)
        if order == "detach":
            say("detached")
            return 0
        if order == "stop":
            stopped = _end(place, running, grace)
            say("stopped" if stopped else "not stopped", pid=running.pid)
            return 0 if stopped else 1
        if (code := process.poll()) is not None:
            gone = _end(place, running, grace)  # the rest of its group
            say("ended", code=code, tail=place.tail(), gone=gone)
            return 1
        if waiting_for is not None and is_ready(waiting_for):
            waiting_for = None
            say("ready")


def _end(place: Place, running: Running, grace: float) -> bool:
    """Calls `end`. Removes the record only if all have ended, because `stop` must find the others."""
    ended = end(running, grace)
    if ended:
        place.record.unlink(missing_ok=True)
    return ended


def _order(seconds: float) -> str | None:
    """Returns the next line of standard input, or `stop` at its end or after a signal."""
    if _terminated:
        return "stop"
    if not select.select([0], [], [], seconds)[0]:
        return None
    line = os.read(0, 4096)
    return line.decode(errors="replace").strip() if line else "stop"


_terminated: list[int] = []


def _terminate(number: int, frame: object) -> None:
    _terminated.append(number)


def stop(place: Place, grace: float) -> int:
    running = place.running()
    if running is None:
        say("unknown")
    elif _end(place, running, grace):
        say("stopped", pid=running.pid)
    else:
        raise NodeError(f"{place.name}, process {running.pid}, has not ended")
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch.node", allow_abbrev=False)
    parser.add_argument("verb", choices=("run", "stop"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--ready")
    # Not SIG_IGN, which the started process would inherit.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _terminate)
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    place = Place(options.folder.expanduser(), options.name)
    try:
        if options.verb == "stop":
            return stop(place, options.grace)
        return run(place, command, options.ready, options.grace)
    except (NodeError, OSError) as error:
        say("failed", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
