# SPDX-License-Identifier: Apache-2.0
"""The launcher's connection to one process: over ssh to the agent that watches it on its host."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections import deque
from dataclasses import dataclass

from vllm_ascend_pd.tools.launch.plan import LaunchedProcess, LaunchPlan, reach

SSH_SECONDS = 30.0
"""Time for ssh to connect and for an agent to start. The agent's own work comes on top."""
_CHATTER_LINES = 20


@dataclass(frozen=True)
class AgentEvent:
    """An agent's message (`started`, `ready`, `detached`, `ended`, ...), or `lost` if ssh has ended."""

    process: LaunchedProcess
    kind: str
    detail: str = ""


class Session:
    """A running agent. Its events go to a queue that the launcher reads."""

    def __init__(self, plan: LaunchPlan, process: LaunchedProcess, events: queue.SimpleQueue[AgentEvent]) -> None:
        self.process = process
        self.log = "?"
        self._plan = plan
        self._events = events
        self._chatter: deque[str] = deque(maxlen=_CHATTER_LINES)
        self._stopped = self._detached = False
        # In its own session, so that Ctrl-C reaches only the launcher, which then stops everything in order.
        self._ssh = subprocess.Popen(
            reach(process, plan.run(process)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"launch-{process.name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._ssh.stdout is not None
        for line in self._ssh.stdout:
            said = _said(line)
            if said is None:
                self._chatter.append(line.rstrip())
                continue
            kind = str(said["event"])
            if kind == "started":
                self.log = str(said.get("log"))
            self._detached = self._detached or kind == "detached"
            # `failed`: the process never ran. A process that runs under its name belongs to another cluster.
            self._stopped = self._stopped or (kind in ("stopped", "ended", "failed") and said.get("gone") is not False)
            detail = self._ended(said) if kind == "ended" else str(said.get("reason", ""))
            self._events.put(AgentEvent(self.process, kind, detail))
        code = self._ssh.wait()
        self._events.put(AgentEvent(self.process, "lost", "\n".join((f"ssh ended with code {code}", *self._chatter))))

    def _ended(self, said: dict[str, object]) -> str:
        return f"ended with code {said.get('code')}; the end of {self.process.host}:{self.log}:\n{said.get('tail')}"

    def detach(self) -> bool:
        """Detaches, and returns whether the agent has confirmed it. An agent that has not stops the process."""
        self._order("detach")
        self._close()
        return self._detached

    def stop(self) -> str | None:
        """Stops the process. Returns None once it has ended, or why that is not known."""
        self._order("stop")
        self._reader.join(2 * self._plan.stop_seconds + SSH_SECONDS)
        self._close()
        if self._stopped:
            return None
        return stop_anew(self._plan, self.process).reason

    def _order(self, order: str) -> None:
        assert self._ssh.stdin is not None
        # ssh has ended or its input is closed. The agent notices both.
        with contextlib.suppress(OSError, ValueError):
            self._ssh.stdin.write(order + "\n")
            self._ssh.stdin.flush()

    def _close(self) -> None:
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError):
            self._ssh.stdin.close()
        try:
            self._ssh.wait(SSH_SECONDS)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        self._reader.join(SSH_SECONDS)


@dataclass(frozen=True)
class StopOutcome:
    """The result of stopping a process."""

    reason: str | None  # why it is not known to have ended; None if it has
    found: bool = True  # whether there was anything to stop


def stop_anew(plan: LaunchPlan, process: LaunchedProcess) -> StopOutcome:
    """Stops a process over a new connection."""
    try:
        done = subprocess.run(
            reach(process, plan.stop(process)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,
            timeout=2 * plan.stop_seconds + SSH_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return StopOutcome(str(error))
    if done.returncode == 0:
        said = [_said(line) for line in done.stdout.splitlines()]
        return StopOutcome(None, found=any(one is not None and one["event"] == "stopped" for one in said))
    chatter = (done.stdout + done.stderr).strip().splitlines()[-_CHATTER_LINES:]
    return StopOutcome(f"ssh ended with code {done.returncode}: " + " ".join(chatter))


def _said(line: str) -> dict[str, object] | None:
    """Parses an agent's line. Returns None for output of ssh or of the login shell."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "event" in said else None
