# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd timeline`: merges trace files, prints where requests' time went, and draws a request."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_ascend_pd.tools.command_line import Version

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_ascend_pd.tools.timeline.read import Recording
    from vllm_ascend_pd.tools.timeline.summary import Request

_MAX_ROWS = 50


def timeline(
    folder: Annotated[Path, typer.Argument(help="The `trace_dir` of all engines, with their trace files.")],
    request: Annotated[
        str | None,
        typer.Option(help="The id of the only request to show, or how it begins.", show_default="all"),
    ] = None,
    version: Version = False,
) -> None:
    """Show where requests spend their time, from the traces of prefill and decode engines.

    Prints a table. Writes FOLDER/timeline.png, a picture of the request with the most bytes, and FOLDER/trace.json for
    https://ui.perfetto.dev or chrome://tracing. The clocks of all hosts must agree (NTP or PTP).
    """
    # Imported here so that other commands start faster.
    from rich.console import Console

    from vllm_ascend_pd.observe.trace_file import TraceError

    try:
        show_timeline(folder, request, Console())
    except TraceError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except OSError as error:
        print(f"vllm-ascend-pd: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from None


def show_timeline(folder: Path, wanted: str | None, console: Console, warm_ups: int = 0) -> None:
    """Prints where the requests' time went, and writes `trace.json` and `timeline.png` into the folder.

    wanted: the id of the only request to show, or how it begins.
    warm_ups: number of first requests to omit.

    Raises TraceError, and OSError if a file cannot be written.
    """
    from rich.markup import escape

    from vllm_ascend_pd.observe.trace_file import TraceError
    from vllm_ascend_pd.tools.timeline.picture import draw
    from vllm_ascend_pd.tools.timeline.read import read_folder
    from vllm_ascend_pd.tools.timeline.summary import summarize

    recordings, problems = read_folder(folder)
    everyone = summarize(recordings)
    requests = [one for one in everyone[warm_ups:] if wanted is None or one.is_named(wanted)]
    if any(one.queue is not None and one.queue < 0 for one in requests):
        problems.append("prefill began before decode asked: hosts' clocks differ, and so times across hosts are wrong")
    for problem in problems:
        console.print(f"[yellow]note:[/] {escape(problem)}", soft_wrap=True)
    if not everyone:
        raise TraceError(f"the traces in {folder} have no transfer: send a prompt that prefill computes")
    if not requests:
        known = ", ".join(one.name for one in everyone[:5])
        raise TraceError(f"no request {wanted} in {folder}; requests: {len(everyone)}, such as {known}")
    console.print(_table(requests))
    if len(requests) > _MAX_ROWS:
        console.print(f"and {len(requests) - _MAX_ROWS} more requests; --request ID shows one")
    if warm_ups:
        console.print(f"left out: the first {warm_ups} requests, which warm up the engines")
    _write_merged(recordings, folder / "trace.json")
    console.print(f"wrote {escape(str(folder / 'trace.json'))}", soft_wrap=True, highlight=False)
    drawn = max(requests, key=lambda one: one.bytes)
    try:
        draw(recordings, drawn, folder / "timeline.png")
    except ImportError:
        console.print(escape("the picture needs matplotlib: pip install matplotlib"), soft_wrap=True)
        return
    said = f"wrote {folder / 'timeline.png'}, a picture of request {drawn.name}"
    console.print(escape(said), soft_wrap=True, highlight=False)


def _table(requests: Sequence[Request]) -> Table:
    """Returns a table of the first requests."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    result = Table(title="where the time went (ms)", box=SIMPLE, padding=0)
    result.add_column("request", overflow="fold")  # the only column that may be narrower than its content
    for heading in requests[0].figures():
        result.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for one in requests[:_MAX_ROWS]:
        failures = "".join(f"\n{failure}" for failure in sorted(one.failures))
        result.add_row(Text(one.name).append(failures, "red"), *one.figures().values())
    return result


def _write_merged(recordings: Sequence[Recording], path: Path) -> None:
    """Writes all events to one file, atomically. Processes are renumbered, since hosts may use the same numbers."""
    import msgspec

    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "xb") as file:
            separator = b"[\n"
            for pid, recording in enumerate(recordings, 1):
                for event in recording.events:
                    file.write(separator + msgspec.json.encode(msgspec.structs.replace(event, pid=pid)))
                    separator = b",\n"
            file.write(b"\n]\n")
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
