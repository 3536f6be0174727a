# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd timeline`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import Version


def timeline(
    folder: Annotated[Path, typer.Argument(help="The `trace_dir` of all engines, with their trace files.")],
    request: Annotated[
        str | None, typer.Option(help="Id of the only request to show.", show_default="all; the largest is drawn")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="PNG file to write.", show_default="FOLDER/timeline[-REQUEST].png"),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="HTML file to write: the same picture, with zoom.",
            show_default="FOLDER/timeline[-REQUEST].html",
        ),
    ] = None,
    version: Version = False,
) -> None:
    """Show where requests spend their time, from the traces of prefill and decode engines.

    Prints a table and draws a picture. Also writes FOLDER/trace.json for https://ui.perfetto.dev or chrome://tracing.
    """
    # Imported here so that other commands start faster.
    from rich.console import Console

    from vllm_ascend_pd.observe.trace_file import TraceError
    from vllm_ascend_pd.tools.timeline.command import show_timeline

    try:
        show_timeline(folder, request, png, html, Console())
    except TraceError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
