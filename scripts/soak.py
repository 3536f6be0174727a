# SPDX-License-Identifier: Apache-2.0
"""Sends thousands of requests through two prefill engines, one of which is killed and restarts, and a decode engine."""

import importlib.util
import shlex
import shutil
import signal as signals
import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness.processes import ManagedProcess, StartupError, interrupt_on_sigterm
from harness.soak.ledger import Ledger, Outcome
from harness.soak.run import Events, Folder, FolderError, Settings, Signal, SoakError, soak

ROOT = Path(__file__).resolve().parents[1]

console = Console(soft_wrap=True, highlight=False)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Screen(Events):
    """Progress on a terminal, and a line per tenth of the requests anywhere."""

    def __init__(self, progress: Progress, requests: int) -> None:
        self._progress = progress
        self._requests = requests
        self._tasks: dict[str, TaskID] = {}
        self._tenth = 0

    def ready(self, process: ManagedProcess, seconds: float) -> None:
        self.say(f"{process.name} ready after {seconds:.0f} s")

    def say(self, text: str) -> None:
        console.print(escape(text))

    def answered(self, missing: int) -> None:
        self._show("right answers missing", missing, None)

    def finished(self, ledger: Ledger) -> None:
        done = len(ledger.finished)
        self._show("requests", done, self._requests)
        if done * 10 // self._requests > self._tenth:
            self._tenth = done * 10 // self._requests
            outcomes = [record.outcome for record in ledger.finished.values()]
            counts = ", ".join(f"{outcomes.count(each):,} {each.value}" for each in Outcome if each in outcomes)
            self.say(f"{done:,} of {self._requests:,}: {counts}")

    def _show(self, what: str, done: int, total: int | None) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)


@app.command()
def main(
    requests: Annotated[
        int, typer.Option(min=1, help="Number of requests. A larger number continues a finished run.")
    ] = 10_000,
    folder: Annotated[
        Path, typer.Option("--dir", file_okay=False, help="Folder for all results. A run there is continued.")
    ] = ROOT / "soak-results",
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the run in the folder.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all requests.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Number of requests in flight.")] = 12,
    signal: Annotated[
        Signal, typer.Option(help="Signal that ends the prefill engine with TP 2 halfway.")
    ] = Signal.KILL,
    sample_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds between two samples of all processes.")] = 3.0,
) -> None:
    """Send many requests through two prefill engines (TP 2 and TP 1) and one decode engine, all vLLM on its CPU
    backend, and compare every answer with a single vLLM instance's.

    Prompts have up to 2,000 tokens, answers 1 to 32; a tenth of the clients
    leave before the end, and in the middle a prefill engine is ended and
    started again. Meanwhile memory, KV blocks, threads and open files of all
    processes are sampled: samples.csv and soak.png in the folder, summary.json
    beside them. Ctrl-C stops everything; the same command goes on from there.

    Exits with 0 only if no answer was wrong, none hung, no block leaked, and
    nothing failed but at the restart.
    """
    interrupt_on_sigterm()
    signals.signal(signals.SIGINT, signals.default_int_handler)  # a shell has its background jobs ignore it
    folder = folder.absolute()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise SoakError("matplotlib is missing, which draws the samples: scripts/setup_env.sh installs it")
        if fresh and Folder(folder).settings.exists():
            shutil.rmtree(folder)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            settings = Settings(seed, concurrency, signal, sample_seconds)
            summary = soak(folder, requests, settings, Screen(progress, requests))
    except KeyboardInterrupt:
        again = [arg for arg in sys.argv[1:] if arg != "--fresh"]
        console.print(f"interrupted; continue with: {escape(shlex.join(['scripts/soak.sh', *again]))}")
        raise typer.Exit(130) from None
    except FolderError as error:
        raise typer.BadParameter(str(error), param_hint="--dir") from None
    except (SoakError, StartupError, OSError, httpx.HTTPError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(1) from None
    console.print(escape(summary.line))
    for reason, count in summary.reasons.most_common():
        console.print(f"  {count:,} x {escape(reason)}")
    console.print("[green]passed[/]" if summary.passed else "[red]FAILED[/]", f"- results are in {folder}")
    raise typer.Exit(0 if summary.passed else 1)


if __name__ == "__main__":
    app()
