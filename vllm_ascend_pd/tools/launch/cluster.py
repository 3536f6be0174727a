# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a cluster in its foreground, until one ends or Ctrl-C. scripts/launch_cluster.sh runs this.

Each process has a terminal of its own: a local pseudo terminal, and behind `ssh -tt` another one on its host. Ctrl-C is
the same key there. A terminal hangs up when the launcher or the connection ends, however that happens, and the hangup
ends the processes that it controls.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import httpx
import typer

from vllm_ascend_pd.tools.command_line import new_app, run_app
from vllm_ascend_pd.tools.launch.hosts import HostsError, read_hosts
from vllm_ascend_pd.tools.launch.plan import SSH, LaunchedProcess, LaunchPlan, make_plan

STOP_SECONDS = 30.0
"""Time for processes to end after Ctrl-C. Engines finish no requests, but release NPUs and shared memory."""
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2
HEALTH_SECONDS = 2.0
_LAST_LINES = 20
_LINE_BYTES = 64 << 10
_CTRL_C = b"\x03"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""Colours and other codes that would change the operator's terminal."""


class End(enum.IntEnum):
    """Exit codes."""

    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


class RunningProcess:
    """A process on its terminal."""

    def __init__(self, process: LaunchedProcess, width: int) -> None:
        """Starts it. `width`: of the names in front of lines."""
        self.process = process
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._prefix = f"{process.name:<{width}} | "
        self._rest = b""
        self.terminal, slave = os.openpty()
        os.set_blocking(self.terminal, False)
        mode = termios.tcgetattr(slave)
        mode[3] &= ~termios.ECHO  # prints no `^C`; ssh passes it on
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        try:
            # `setsid --ctty` gives the process a session with that terminal, then becomes the process.
            command = ("setsid", "--ctty", *process.local_command)
            self._child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
        finally:
            os.close(slave)

    def has_ended(self) -> bool:
        # Its number stays taken until `kill` reaps it, so that the number's process group is surely this one.
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def print_lines(self) -> bool:
        """Prints the lines that are there. Returns whether more can come."""
        try:
            data = os.read(self.terminal, _LINE_BYTES)
        except OSError:  # nobody has the other side open any more
            data = b""
        *lines, self._rest = re.split(rb"[\r\n]+", self._rest + data)  # progress bars end lines with \r
        if not data or len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if text := _CONTROL.sub("", line.decode(errors="replace")).rstrip():
                self.last_lines.append(text)
                sys.stdout.buffer.write(f"{self._prefix}{text}\n".encode())
        sys.stdout.flush()
        return bool(data)

    def print_rest(self) -> None:
        while self.print_lines():
            pass

    def press_ctrl_c(self) -> None:
        with contextlib.suppress(OSError):  # it has closed its terminal: only `kill` ends it
            os.write(self.terminal, _CTRL_C)

    def kill(self) -> int | None:
        """Hangs up, kills what is left here, and returns the exit code. None: it has not ended."""
        os.close(self.terminal)
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:  # `setsid` has not made the group yet
            self._child.kill()
        try:
            return self._child.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return None


class Launcher:
    """The processes of a plan."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._width = max(len(process.name) for process in plan.processes)
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._running: list[RunningProcess] = []

    def run(self) -> End:
        """Starts all processes at once. Returns after one has ended, or after Ctrl-C, with all others stopped."""
        ended = None
        try:
            ended = self._watch()
            _say(f"error: {ended.process.name} on {ended.process.host} has ended; stopping all others")
        except KeyboardInterrupt:
            _say("interrupted; stopping all")
        finally:
            try:
                self._press_ctrl_c()
            finally:
                codes = {one.process.name: one.kill() for one in self._running}
        if ended is not None:
            last = "\n".join(ended.last_lines)
            _say(f"error: {ended.process.name} ended with code {codes[ended.process.name]}; its last lines:\n{last}")
        if left := [name for name, code in codes.items() if code is None]:
            _say(f"error: these may still run: {', '.join(left)}")
            return End.FAILED
        _say("all stopped")
        return End.INTERRUPTED if ended is None else End.FAILED

    def _watch(self) -> RunningProcess:
        """Starts all processes. Returns the first that ends."""
        for process in self._plan.processes:
            self._running.append(RunningProcess(process, self._width))
            self._selector.register(self._running[-1].terminal, selectors.EVENT_READ, self._running[-1])
        threading.Thread(target=_announce, args=(self._plan.endpoint, self._over), daemon=True).start()
        try:
            while True:
                self._print_lines()
                for one in self._running:
                    if one.has_ended():
                        one.print_rest()
                        return one
        finally:
            self._over.set()

    def _press_ctrl_c(self) -> None:
        """Presses Ctrl-C on each terminal, and returns when all have ended, after a while, or after a second Ctrl-C."""
        deadline = time.monotonic() + STOP_SECONDS
        try:
            for one in self._running:
                one.press_ctrl_c()
            while not all(one.has_ended() for one in self._running) and time.monotonic() < deadline:
                self._print_lines()
            for one in self._running:
                if one.has_ended():
                    one.print_rest()
        except KeyboardInterrupt:
            _say("killing all")

    def _print_lines(self) -> None:
        for key, _ in self._selector.select(POLL_SECONDS):
            if not key.data.print_lines():
                self._selector.unregister(key.fileobj)


def _announce(endpoint: str, over: threading.Event) -> None:
    """Says when the proxy serves, which it does once an engine of each role is healthy."""
    while not over.wait(POLL_SECONDS):
        try:
            answer = httpx.get(f"{endpoint}/health", timeout=HEALTH_SECONDS, trust_env=False)
        except httpx.HTTPError:
            continue
        if answer.status_code == httpx.codes.OK:
            _say(f"serving at {endpoint}; Ctrl-C stops it")
            return


def dry_run(plan: LaunchPlan) -> str:
    """Returns the command of each host, and above it where it runs. It has no secrets."""
    lines = []
    for process in plan.processes:
        where = "here" if process.ssh is None else f"ssh {process.ssh}"
        lines += [f"# {process.name} on {process.host} ({where})", shlex.join(process.command)]
    return "\n".join([*lines, f"# over ssh by: {shlex.join(SSH)} HOST COMMAND", f"# then serving at {plan.endpoint}"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


app = new_app()


@app.command()
def main(
    hosts: Annotated[Path, typer.Argument(metavar="HOSTS_YAML", help="Describes the cluster (docs/configuration.md).")],
    dry_run_only: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands for each host, and start nothing.")
    ] = False,
    *,
    repository: Annotated[Path, typer.Option(hidden=True)],
) -> None:
    """Start a prefill/decode cluster on its hosts over ssh, in the foreground.

    Prints all logs side by side and says when the cluster serves: once the proxy's /health, asked from here, is good.
    Ctrl-C ends all processes, and so does the end of one of them. examples/ has examples of HOSTS_YAML.

    PYTHON (default: $VENV/bin/python, else python3) is a Python with this package; `python:` in hosts.yaml names the
    one on the hosts. ssh must not ask for passwords: use keys or an agent. Logs go to standard output, all else to
    standard error; processes that print wait for both to be read. Exit codes: 2 for an invalid hosts.yaml, 1 if a
    process has ended, 130 after Ctrl-C or SIGTERM.
    """
    try:
        plan = make_plan(read_hosts(hosts), sys.executable, str(repository))
    except HostsError as error:
        _say(f"launch_cluster: {hosts.name}: {error}")
        raise typer.Exit(End.USAGE) from None
    if dry_run_only:
        print(dry_run(plan))
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background jobs ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup. Processes must not inherit it.
        signal.signal(signal.SIGHUP, lambda *_: None)
    raise typer.Exit(Launcher(plan).run())


REMOVED = {
    "--stop": "press Ctrl-C where the launcher runs, or send it SIGTERM",
    "--detach": "run the launcher in tmux, with nohup, or as a service",
}
"""Options of earlier versions, and what to do instead."""

if __name__ == "__main__":
    for _option in REMOVED.keys() & set(sys.argv):
        _say(f"launch_cluster: {_option} was removed: {REMOVED[_option]}")
        sys.exit(End.USAGE)
    run_app(app, "launch_cluster.sh")
