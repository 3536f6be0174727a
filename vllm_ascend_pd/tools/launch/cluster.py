# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a cluster in its foreground, until one ends or Ctrl-C. scripts/launch_cluster.sh runs this.

Each process has a terminal of its own: a local pseudo terminal, and behind `ssh -tt` another one on its host. Ctrl-C is
the same key there. A terminal hangs up when the launcher or the connection ends, however that happens, and the hangup
ends the processes that it controls.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import new_app, removed_option, run_app
from vllm_ascend_pd.tools.launch.hosts import LaunchedProcess, make_plan, parse_hosts

SSH = shlex.split("ssh -tt -e none -oBatchMode=yes -oLogLevel=ERROR -oConnectTimeout=15 -oServerAliveInterval=15 --")
"""`-tt`: a terminal on the host, which hangs up with the connection. `-e none`: ssh passes every byte on."""
STOP_SECONDS = 30.0
"""Time for processes to end after Ctrl-C. Engines finish no requests, but release NPUs and shared memory."""
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2
say = partial(print, file=sys.stderr, flush=True)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""Colours and other codes that would change the operator's terminal."""


class RunningProcess:
    """A process on its terminal. A thread prints its lines."""

    def __init__(self, process: LaunchedProcess, width: int) -> None:
        """Starts it. `width`: of the names in front of lines."""
        self.name = process.name
        self._prefix = f"{process.name:<{width}} | "
        self.terminal, slave = os.openpty()
        # `setsid --ctty` gives the process a session with that terminal, then becomes the process.
        command = ("setsid", "--ctty", *local_command(process))
        self.child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.printer = threading.Thread(target=self._print_lines, daemon=True)
        self.printer.start()

    def _print_lines(self) -> None:
        with contextlib.suppress(OSError), open(self.terminal, errors="replace", closefd=False) as lines:
            while line := lines.readline(64 << 10):  # a line may also end with \r, as those of progress bars do
                if text := _CONTROL.sub("", line).rstrip():
                    sys.stdout.write(f"{self._prefix}{text}\n")
                    sys.stdout.flush()


def run(plan: Sequence[LaunchedProcess]) -> int:
    """Starts all processes at once. Returns an exit code after one has ended, or after Ctrl-C, with all stopped."""
    running: list[RunningProcess] = []
    ended: list[RunningProcess] = []
    try:
        running.extend(RunningProcess(each, max(len(one.name) for one in plan)) for each in plan)
        while not ended:
            time.sleep(POLL_SECONDS)
            ended = [one for one in running if one.child.poll() is not None]
        say(f"error: {ended[0].name} ended with code {ended[0].child.poll()}; stopping all others")
    except KeyboardInterrupt:
        say("interrupted; stopping all")
    deadline = time.monotonic() + STOP_SECONDS
    try:
        for one in running:
            with contextlib.suppress(OSError):  # it has closed its terminal
                os.write(one.terminal, b"\x03")  # the key Ctrl-C
        while any(one.child.poll() is None for one in running) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        say("killing all")
    for one in running:
        one.child.kill()  # if it runs. The kernel then hangs up its terminal, which ends what else runs there.
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.child.wait(KILL_SECONDS)
        one.printer.join(KILL_SECONDS)
    left = [one.name for one in running if one.child.poll() is None]
    say(f"error: these may still run: {', '.join(left)}" if left else "all stopped")
    return 1 if ended or left else 130


def local_command(process: LaunchedProcess) -> tuple[str, ...]:
    """The local command that runs a process on its host. A shell there splits the last word again."""
    return process.command if process.ssh is None else (*SSH, process.ssh, shlex.join(process.command))


app = new_app()


@app.command()
def main(
    hosts: Annotated[Path, typer.Argument(metavar="HOSTS_YAML", help="Describes the cluster (docs/configuration.md).")],
    repository: Annotated[Path, typer.Option(hidden=True)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print all commands, and start nothing.")] = False,
) -> None:
    """Start a prefill/decode cluster on its hosts over ssh, in the foreground.

    Prints all logs side by side. Ctrl-C ends all processes, and so does the end of one of them. PYTHON (default:
    $VENV/bin/python, else python3) is a Python with this package. ssh must not ask for passwords: use keys or an agent.
    Exit codes: 2 for an invalid hosts.yaml, 1 if a process has ended, 130 after Ctrl-C or SIGTERM.
    """
    try:
        plan = make_plan(parse_hosts(hosts.read_text(encoding="utf-8")), sys.executable, str(repository))
    except (OSError, ValueError) as error:
        say(f"launch_cluster: {hosts.name}: {error}")
        raise typer.Exit(2) from None
    if dry_run:
        for process in plan:
            print(f"# {process.name} on {process.ssh or 'this machine'}\n{shlex.join(process.command)}")
        return
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # without a reader of the logs, the launcher ends, and so do all
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background jobs ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup. Processes must not inherit it.
        signal.signal(signal.SIGHUP, lambda *_: None)
    raise typer.Exit(run(plan))


if __name__ == "__main__":
    instead = "Ctrl-C or SIGTERM stops the launcher; use tmux or nohup"
    if removed := removed_option(sys.argv[1:], {"--stop": instead, "--detach": instead}):
        say(f"launch_cluster: {removed}")
        sys.exit(2)
    run_app(app, "launch_cluster.sh")
