# SPDX-License-Identifier: Apache-2.0
"""Program of first_hours.sh: the steps of a first session on NPUs, each in processes of its own with a time limit."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
MACHINE = (sys.executable, "-c", "from vllm_ascend_pd.cli import main; main()", "doctor", "--json")
DOCTOR = (*MACHINE, "--hardware")
ASKED = ("hardware", "peer", "descriptors")
"""Areas of the doctor's findings that its steps are about here. The step `machine` is about the others."""
TWO_NPUS = (("CANN_ON_HOST_DEVICES", "2"),)
"""Of an emulated server: its ranks share the host's cores."""
GRACE_S = 30.0
"""Seconds in which the processes of a step end by themselves when its time is over."""
LONG = ("--prefill-tp", "4", "--prompt-tokens", "500,4000,16000")
SCHEMA = 1
SUMMARY = "summary.json"


@dataclasses.dataclass(frozen=True)
class Command:
    """A process of a step. Its standard output goes to `output` in the results' folder, errors to the step's log."""

    arguments: tuple[str, ...]
    # None: into the log, too.
    output: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """A step holds if all its commands, which run at the same time, end with 0."""

    name: str
    minutes: float
    # The question that it answers.
    question: str
    commands: tuple[Command, ...]
    # Whether it starts engines, which take minutes.
    has_engines: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: str
    question: str
    # "held", "failed" or "took too long".
    result: str
    seconds: int
    files: tuple[str, ...]


def steps(
    model: Path | None, moe: Path | None, peer: str | None, other_mooncake: Path | None, *, emulate: bool
) -> list[Step]:
    """Returns all steps in their order."""
    own = ("--emulate",) if emulate else ()
    pair = (str(ROOT / "scripts/run_1p1d.sh"), "--device", "npu", *own, "--verify-kv")
    dense = (*pair, *(("--model", str(model)) if model else ()))
    found = []
    if not emulate:
        tools = Command(("bash", "-c", "npu-smi info; cat /etc/hccn.conf; true"))
        question = "Do driver, addresses and versions fit together?"
        found.append(Step("machine", 5, question, (tools, Command(MACHINE, "machine.json"))))
        build = (sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        forced = (("VLLM_ASCEND_PD_NPU_KERNELS", "1"),)
        found.append(
            Step("kernels", 25, "Does CANN's compiler take the kernels?", (Command(build, environment=forced),))
        )
    question = "Are operators, writes and collectives right, and how fast? What does a first connection take?"
    found.append(Step("hardware", 8, question, (Command(DOCTOR, "hardware.json", TWO_NPUS if emulate else ()),)))
    if other_mooncake is not None:
        path = (("PYTHONPATH", os.pathsep.join(filter(None, (str(other_mooncake), os.environ.get("PYTHONPATH"))))),)
        again = Command(DOCTOR, "other-mooncake.json", path)
        found.append(Step("other-mooncake", 8, "The same with the other Mooncake", (again,)))
    if emulate or peer is not None:
        question = "What do writes to a second server take? Does a group of ranks of two servers work?"
        found.append(Step("peer", 10, question, peer_commands(peer)))
    for name, minutes, question, options in (
        ("pair-eager", 12, "Does a pair give a single engine's tokens, and is all KV verified?", ()),
        ("pair-graphs", 12, "The same with graphs", ("--graphs",)),
        ("tp4-to-tp2", 12, "TP 4 to 2, long prompts: how long are they on their way?", (*LONG, "--decode-tp", "2")),
        ("tp4-to-tp1", 12, "The same with TP 4 to 1", (*LONG, "--decode-tp", "1")),
    ):
        command = Command((*dense, *options, "--timeline", f"{name}-timeline"))
        if not (emulate and name == "pair-graphs"):  # nothing emulates graphs
            found.append(Step(name, minutes, question, (command,), has_engines=True))
    compare = (sys.executable, str(ROOT / "scripts/compare_connectors.py"), "--result", "comparison.json")
    compare += (*own, *(("--model", str(model)) if model else ()))
    question = "The same load by turns with vllm-ascend's layerwise connector and with this one"
    found.append(Step("comparison", 25, question, (Command(compare),), has_engines=True))
    if moe is not None:
        graphs = '--enable-expert-parallel --compilation-config \'{"cudagraph_mode":"FULL_DECODE_ONLY"}\''
        experts = (*pair, "--model", str(moe), "--prefill-tp", "2", "--decode-tp", "2", "--graphs")
        experts += ("--prefill-args", "--enable-expert-parallel --enforce-eager", "--decode-args", graphs)
        question = "Experts or MLA with expert parallelism and graphs on decode"
        found.append(Step("experts", 15, question, (Command(experts),), has_engines=True))
    return found


def peer_commands(peer: str | None) -> tuple[Command, ...]:
    """Returns the doctor's with a second server; on one emulated machine, both servers'."""
    if peer is not None:
        return (Command((*DOCTOR, "--peer", peer), "peer.json"),)
    one, other = "127.0.0.2", "127.0.0.3"
    return tuple(
        Command(
            (*DOCTOR, "--peer", there), file, (("VLLM_HOST_IP", here), ("CANN_ON_HOST_FIRST_DEVICE", first), *TWO_NPUS)
        )
        for here, there, file, first in ((one, other, "peer.json", "0"), (other, one, "peer-other.json", "2"))
    )


def run(step: Step, results: Path) -> Outcome:
    """Runs a step. Ends all its processes when its time is over."""
    began, log = time.monotonic(), results / f"{step.name}.log"
    files = (log.name, *(each.output for each in step.commands if each.output))
    with log.open("wb") as errors:
        processes = [_start(each, results, errors) for each in step.commands]
        result = "held"
        for command, process in zip(step.commands, processes, strict=True):
            try:
                code = process.wait(max(0.0, began + 60 * step.minutes - time.monotonic()))
            except subprocess.TimeoutExpired:
                result = "took too long"
                break
            if code and result == "held" and not _only_others_failed(command, results):
                result = "failed"
        for process in processes:
            _end(process)
    return Outcome(step.name, step.question, result, round(time.monotonic() - began), files)


def _only_others_failed(command: Command, results: Path) -> bool:
    """Returns whether the doctor's errors are those of the step `machine`."""
    if command.output is None or "--hardware" not in command.arguments:
        return False
    try:
        report = json.loads((results / command.output).read_text())
    except ValueError:
        return False
    return not any(each["level"] == "error" and each["check"].split(".")[0] in ASKED for each in report["findings"])


def _start(command: Command, results: Path, errors: object) -> subprocess.Popen[bytes]:
    output = (results / command.output).open("wb") if command.output else errors
    return subprocess.Popen(
        command.arguments,
        cwd=results,
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[arg-type]
        stderr=errors,  # type: ignore[arg-type]
        env={**os.environ, **dict(command.environment)},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process with its group, which may outlive it."""
    for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + (grace if process.poll() is None else 1.0)
        while time.monotonic() < deadline and _lives(process):
            time.sleep(0.1)


def _lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def findings(results: Path) -> dict[str, list[dict[str, object]]]:
    """Returns what the doctor has found, by its file's name. Figures are as in its report."""
    found = {}
    for file in sorted(results.glob("*.json")):
        if file.name == SUMMARY:
            continue
        try:
            report = json.loads(file.read_text())
        except ValueError:
            continue
        if isinstance(report, dict) and "findings" in report:
            found[file.stem] = [
                {key: each[key] for key in ("check", "level", "found", "figures")}
                for each in report["findings"]
                if each["check"].split(".")[0] in ASKED
            ]
    return found


def keep_plog(results: Path, since: float) -> None:
    """Keeps CANN's newest logs, which say why HIXL or HCCL failed."""
    logs = [file for file in Path.home().glob("ascend/log/**/*.log") if file.stat().st_mtime >= since]
    if logs:
        with tarfile.open(results / "plog.tar.gz", "w:gz") as archive:
            for file in sorted(logs, key=lambda file: file.stat().st_mtime)[-200:]:
                archive.add(file)


def main(
    results: Annotated[Path | None, typer.Option(file_okay=False)] = None,
    model: Annotated[Path | None, typer.Option(exists=True, file_okay=False, resolve_path=True)] = None,
    moe: Annotated[Path | None, typer.Option(exists=True, file_okay=False, resolve_path=True)] = None,
    peer: Annotated[str | None, typer.Option()] = None,
    other_mooncake: Annotated[Path | None, typer.Option(exists=True, file_okay=False, resolve_path=True)] = None,
    only: Annotated[str | None, typer.Option("--steps")] = None,
    short: Annotated[bool, typer.Option("--short")] = False,
    emulate: Annotated[bool, typer.Option("--emulate")] = False,
) -> None:
    """Run the steps of a first session on NPUs."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if emulate:
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    chosen = steps(model, moe, peer, other_mooncake, emulate=emulate)
    if only is not None:
        names = [name for name in only.split(",") if name]
        if unknown := set(names) - {step.name for step in chosen}:
            print(
                f"first_hours: no step {', '.join(sorted(unknown))}: there are "
                f"{', '.join(step.name for step in chosen)}",
                file=sys.stderr,
            )
            raise typer.Exit(2)
        chosen = [step for step in chosen if step.name in names]
    elif short:
        chosen = [step for step in chosen if not step.has_engines]
    folder = (results or Path(time.strftime("first-hours-%Y%m%d-%H%M%S"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    since = time.time()
    outcomes = []
    for step in chosen:
        print(f"{step.name}: {step.question} ({step.minutes:g} minutes at most) ...", file=sys.stderr, flush=True)
        outcomes.append(run(step, folder))
        _write_summary(folder, outcomes, emulated=emulate)  # so that a cut-off loses nothing
    keep_plog(folder, since)
    for each in outcomes:
        print(f"{each.step:<16} {each.result:<14} {each.seconds:5d} s  {each.question}")
    print(f"results: {shlex.quote(str(folder))}")
    raise typer.Exit(0 if all(each.result == "held" for each in outcomes) else 1)


def _write_summary(folder: Path, outcomes: Sequence[Outcome], *, emulated: bool) -> None:
    summary = {
        "schema": SCHEMA,
        # True: no figure is one of hardware.
        "emulated": emulated,
        "date": time.strftime("%Y-%m-%d"),
        "steps": [dataclasses.asdict(each) for each in outcomes],
        "findings": findings(folder),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
