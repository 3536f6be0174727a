# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and stops the processes of a cluster on their hosts. scripts/launch_cluster.sh runs this."""

from __future__ import annotations

import enum
import queue
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console

from vllm_ascend_pd.tools.command_line import run_app
from vllm_ascend_pd.tools.launch.hosts import HostsError, HostsFile, Invalid
from vllm_ascend_pd.tools.launch.plan import LaunchedProcess, LaunchPlan, make_plan
from vllm_ascend_pd.tools.launch.session import AgentEvent, Session, stop_anew

WATCH_SECONDS = 1.0
_FAILURES = ("ended", "failed", "lost", "stopped", "not stopped")


class LaunchError(RuntimeError):
    """Ends the program with this message after everything was stopped."""


class End(enum.IntEnum):
    """Exit codes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


class Launcher:
    """The started processes of a plan, and their events."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._sessions: list[Session] = []
        self._events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts all processes and returns when all are ready. Raises LaunchError."""
        begun = time.monotonic()
        deadline = begun + self._plan.start_seconds
        for stage in self._plan.stages:
            waiting = {process.name for process in stage}
            for process in stage:
                self._sessions.append(self._session(process))
            while waiting:
                event = self._next(deadline - time.monotonic())
                if event is None:
                    raise LaunchError(
                        f"not healthy after {self._plan.start_seconds:g} s: {', '.join(sorted(waiting))}; "
                        f"logs: {self._plan.folder} on each host"
                    )
                if event.kind == "ready":
                    waiting.discard(event.process.name)
                    self._say(
                        f"{event.process.name} on {event.process.host} ready after {time.monotonic() - begun:.0f} s"
                    )

    def watch(self) -> NoReturn:
        """Watches the processes until one ends, then raises LaunchError."""
        while True:
            self._next(WATCH_SECONDS)

    def detach(self) -> None:
        """Leaves all processes running. Raises LaunchError if a process may have been stopped."""
        with ThreadPoolExecutor(len(self._sessions)) as pool:
            heard = list(pool.map(Session.detach, self._sessions))
        lost = [session.process for session, it in zip(self._sessions, heard, strict=True) if not it]
        if lost:
            raise LaunchError("lost while detaching: " + ", ".join(f"{one.name} on {one.host}" for one in lost))

    def stop(self) -> list[str]:
        """Stops all started processes in parallel. Returns those that could not be stopped, with the reason."""
        if not self._sessions:
            return []
        with ThreadPoolExecutor(len(self._sessions)) as pool:
            reasons = list(pool.map(Session.stop, self._sessions))
        return _named(zip((session.process for session in self._sessions), reasons, strict=True))

    def _session(self, process: LaunchedProcess) -> Session:
        try:
            return Session(self._plan, process, self._events)
        except OSError as error:
            raise LaunchError(f"{process.name}: {error}") from None

    def _next(self, seconds: float) -> AgentEvent | None:
        """Returns the next event, or None after `seconds`. Raises LaunchError if the event is a failure."""
        try:
            event = self._events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if event.kind in _FAILURES:
            detail = event.detail or event.kind
            what = detail if event.kind == "ended" else f"could not be started or watched: {detail}"
            raise LaunchError(f"{event.process.name} on {event.process.host} {what}")
        return event

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class ClusterRecord:
    """The record of the running plan. `--stop` uses it, because hosts.yaml may have changed since.

    It is found by the cluster's `name` and `state`.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.path = Path(plan.folder).expanduser() / "cluster.json"

    def write(self, plan: LaunchPlan) -> None:
        """Raises LaunchError if there is a record already: that cluster runs, or was never stopped."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.path.open("xb") as file:
                file.write(msgspec.json.encode(plan))
        except FileExistsError:
            raise LaunchError(f"this cluster was started and not stopped ({self.path}): run --stop first") from None
        except OSError as error:
            raise LaunchError(f"{self.path} cannot be written: {error}") from None

    def read(self) -> LaunchPlan | None:
        """Raises LaunchError."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=LaunchPlan)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise LaunchError(f"{self.path} cannot be read: {error}") from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def launch(plan: LaunchPlan, detach: bool, console: Console) -> End:
    """Starts a cluster and runs until a process ends or Ctrl-C is pressed. With `detach`, returns when all are ready.

    Raises LaunchError if nothing was started.
    """
    record, launcher = ClusterRecord(plan), Launcher(plan, console)
    record.write(plan)
    end, reason = End.OK, ""
    try:
        launcher.start()
        _say(console, f"serving at {plan.endpoint}")
        if detach:
            launcher.detach()
            return End.OK
        _say(console, "Ctrl-C stops it")
        launcher.watch()
    except KeyboardInterrupt:
        end, reason = End.INTERRUPTED, "interrupted"
    except LaunchError as error:
        end, reason = End.FAILED, f"error: {error}"
    _say(console, f"{reason}\nstopping all others" if end is End.FAILED else f"{reason}; stopping all")
    left = launcher.stop()
    if left:
        return _left(console, left, record)
    record.remove()
    _say(console, "all stopped")
    return end


def stop(plan: LaunchPlan, console: Console) -> End:
    """Stops all processes that the record or the current hosts.yaml names."""
    record = ClusterRecord(plan)
    recorded = record.read()
    work = [(plan, process) for process in plan.processes]
    if recorded is not None:
        known = {(process.name, process.ssh) for process in plan.processes}
        work += [(recorded, p) for p in recorded.processes if (p.name, p.ssh) not in known]
    with ThreadPoolExecutor(len(work)) as pool:
        outcomes = list(pool.map(lambda item: stop_anew(*item), work))
    left = _named((process, outcome.reason) for (_, process), outcome in zip(work, outcomes, strict=True))
    if left:
        return _left(console, left, record)
    record.remove()
    if recorded is None and not any(outcome.found for outcome in outcomes):
        folder, _, name = plan.folder.rpartition("/")
        _say(console, f"no process of {name} is recorded in {folder}, here or on the hosts")
    else:
        _say(console, "all stopped")
    return End.OK


def dry_run(plan: LaunchPlan) -> str:
    """Returns the commands as a shell script, with the host of each process. It has no secrets."""
    lines = []
    for number, stage in enumerate(plan.stages, 1):
        lines.append(f"# stage {number} of {len(plan.stages)}")
        for process in stage:
            where = "here" if process.ssh is None else f"ssh {process.ssh}"
            ready = f"until {process.ready} answers" if process.ready else "ready at once"
            lines += [f"# {process.name} on {process.host} ({where}), {ready}", shlex.join(process.command)]
    lines.append(f"# then serving at {plan.endpoint}; logs in {plan.folder} on each host")
    lines.append(f"# each is started and watched by {shlex.join(plan.agent)} on its host")
    return "\n".join(lines)


def _named(reasons: Iterable[tuple[LaunchedProcess, str | None]]) -> list[str]:
    return [f"{process.name} on {process.host}: {reason}" for process, reason in reasons if reason is not None]


def _left(console: Console, left: Sequence[str], record: ClusterRecord) -> End:
    _say(console, "error: these may still run:\n" + "\n".join(left))
    gone = f"; if a host is gone for good, remove {record.path}" if record.path.exists() else ""
    _say(console, f"try again with --stop{gone}")
    return End.FAILED


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": []})
def main(
    hosts: Annotated[Path, typer.Argument()],
    dry_run_only: Annotated[bool, typer.Option("--dry-run")] = False,
    stop_only: Annotated[bool, typer.Option("--stop")] = False,
    detach: Annotated[bool, typer.Option("--detach")] = False,
    *,
    repository: Annotated[Path, typer.Option(help="The repository of the script that runs this.")],
) -> None:
    """scripts/launch_cluster.sh documents the options."""
    console = Console(stderr=True)
    if sum((dry_run_only, stop_only, detach)) > 1:
        _say(console, "launch_cluster: use only one of --dry-run, --stop and --detach")
        raise typer.Exit(End.USAGE)
    try:
        file = HostsFile.read(hosts)
        try:
            plan = make_plan(file.cluster, sys.executable, str(repository))
        except Invalid as error:
            raise file.located(error) from None
    except HostsError as error:
        _say(console, f"launch_cluster: {error}")
        raise typer.Exit(End.USAGE) from None
    if dry_run_only:
        print(dry_run(plan))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        end = stop(plan, console) if stop_only else launch(plan, detach, console)
    except LaunchError as error:
        _say(console, f"error: {error}")
        end = End.FAILED
    except KeyboardInterrupt:
        # A second Ctrl-C while stopping. Agents that lose their launcher stop their processes by themselves.
        end = End.INTERRUPTED
    raise typer.Exit(end)


if __name__ == "__main__":
    run_app(app, "launch_cluster.sh")
