# SPDX-License-Identifier: Apache-2.0
"""Turns a folder of traces into a table, a picture and a page, for `vllm-ascend-pd timeline`."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from vllm_ascend_pd.observe.trace_file import TraceError
from vllm_ascend_pd.tools.timeline.merge import chrome_trace, merge
from vllm_ascend_pd.tools.timeline.page import page
from vllm_ascend_pd.tools.timeline.picture import Picture, paint
from vllm_ascend_pd.tools.timeline.placements import placements
from vllm_ascend_pd.tools.timeline.png import draw_png
from vllm_ascend_pd.tools.timeline.read import read_folder
from vllm_ascend_pd.tools.timeline.summary import Request, chosen, summarize
from vllm_ascend_pd.tools.timeline.table import MAX_ROWS, table

_NO_MATPLOTLIB = "the picture needs matplotlib: pip install matplotlib"


def show_timeline(
    folder: Path, wanted: str | None, png: Path | None, html: Path | None, console: Console, warm_ups: int = 0
) -> None:
    """Prints where the requests' time went, and writes `trace.json`, a page and a picture.

    wanted: the id of the only request to show.
    png, html: paths of picture and page. By default they are timeline.png and timeline.html in the folder, with the id
      of a wanted request in their names.
    warm_ups: number of first requests to omit.

    Raises TraceError.
    """
    recordings, problems = read_folder(folder)
    for problem in problems:
        console.print(f"[yellow]note:[/] {escape(problem)}", soft_wrap=True)
    timeline = merge(recordings)
    for placed in placements(timeline):
        console.print(str(placed), highlight=False)
    everyone = summarize(timeline)
    requests = chosen(everyone[warm_ups:], wanted)
    if not everyone:
        raise TraceError(f"the traces in {folder} have no transfer: send a prompt that prefill computes")
    if not requests:
        known = ", ".join(one.name for one in everyone[:5])
        raise TraceError(f"no request {wanted} in {folder}; requests: {len(everyone)}, such as {known}")
    console.print(table(requests, console.width))
    if len(requests) > MAX_ROWS:
        console.print(f"and {len(requests) - MAX_ROWS} more requests; --request ID shows one")
    if warm_ups:
        console.print(f"left out: the first {warm_ups} requests, which warm up the engines")
    console.print(f"{len(recordings)} processes; {timeline.clock_note}", highlight=False)
    looked_at = max(requests, key=lambda one: one.bytes)
    picture = paint(timeline, everyone, looked_at)
    note = timeline.clock_note
    text = page(picture, requests[:MAX_ROWS], note)
    merged = msgspec.json.encode(chrome_trace(timeline))
    stem = "timeline" if wanted is None else f"timeline-{_in_file_names(looked_at)}"
    written = [_write(folder / "trace.json", merged), _write(html or folder / f"{stem}.html", text.encode())]
    if (drawn := _draw(picture, note, png, folder / f"{stem}.png", console)) is not None:
        written.append(drawn)
    if len(requests) > 1:
        console.print(f"the picture shows request {escape(looked_at.name)}, which has the most bytes", soft_wrap=True)
    for path in written:
        console.print(f"wrote {escape(str(path))}", soft_wrap=True, highlight=False)


def _in_file_names(request: Request) -> str:
    """Returns the request's id if a file name may have it, else its transfer's fingerprint, made safe."""
    usable = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,99}", request.name)
    return request.name if usable else re.sub(r"[^A-Za-z0-9]", "_", request.transfer)


def _draw(picture: Picture, note: str, png: Path | None, default: Path, console: Console) -> Path | None:
    """Returns the PNG's path, or None without matplotlib, which is only required if `png` is given."""
    path = png or default
    try:
        draw_png(picture, note, path)
    except ImportError:
        if png is not None:
            raise TraceError(_NO_MATPLOTLIB) from None
        console.print(escape(_NO_MATPLOTLIB), soft_wrap=True)
        return None
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _write(path: Path, content: bytes) -> Path:
    """Writes the file atomically. Replaces a symbolic link instead of following it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
    return path
