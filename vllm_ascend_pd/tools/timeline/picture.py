# SPDX-License-Identifier: Apache-2.0
"""Draws one request's way: layers are computed, regrouped and written at the same time. Only this module needs
matplotlib."""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_pd.tools.timeline.read import Recording, TraceEvent
from vllm_ascend_pd.tools.timeline.summary import Request

_MAX_ROWS = 40
_MAX_BARS = 5000
"""Most bars of a row."""

Row = list[tuple[TraceEvent, bool]]
"""Spans, each with whether it is the request's."""


def draw(recordings: Sequence[Recording], request: Request, path: Path) -> None:
    """Writes a PNG. Raises ImportError without matplotlib, OSError if the file cannot be written."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("MPLCONFIGDIR", scratch)  # otherwise matplotlib writes its cache to the user's home
        # Otherwise it logs that it builds this cache.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        _draw(rows_of(recordings, request), request, path)


def headline(request: Request) -> str:
    """Returns the result in one line."""
    if not request.bytes or request.compute_end is None:
        return f"request {request.name[:60]}"
    early = request.early_bytes / request.bytes
    text = f"{early:.0%} of the KV was in decode's cache when prefill's forward pass ended"
    if request.ready is not None:
        after = (request.ready - request.compute_end) / 1000
        text += f"; decode was ready {abs(after):.1f} ms {'later' if after >= 0 else 'earlier'}"
    return text


def rows_of(recordings: Sequence[Recording], request: Request) -> dict[str, Row]:
    """Returns the rows of prefill's ranks in which the request has a span."""
    rows: dict[str, Row] = {}
    for recording in recordings:
        rank = f"P{recording.process.pp_rank}/{recording.process.rank}"
        of_rank: dict[str, Row] = {}
        is_mine = False
        for event in recording.events:
            args = event.args
            if event.cat == "step" and event.ph == "B":
                is_mine = any(part.transfer == request.transfer for part in args.parts)
            elif event.cat == "layer":
                of_rank.setdefault(f"{rank} computes", []).append((event, is_mine))
            elif event.cat == "regroup":
                of_rank.setdefault(f"{rank} regroups", []).append((event, request.transfer in args.transfers))
            elif event.cat == "write":
                is_written = request.transfer in args.written
                of_rank.setdefault(f"{rank} writes to D{args.to}", []).append((event, is_written))
        # Engines may share a rank's name. Only one engine serves a request.
        rows |= {name: row for name, row in sorted(of_rank.items()) if any(mine for _, mine in row)}
    return rows


def _draw(rows: dict[str, Row], request: Request, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shown = list(rows.items())[:_MAX_ROWS]
    mine = sorted((event for _, row in shown for event, is_mine in row if is_mine), key=lambda event: event.ts)
    layers = list(dict.fromkeys(event.args.layer for event in mine))  # in the order in which they are computed
    scale, palette = Normalize(0, max(1, len(layers) - 1)), colormaps["viridis"]
    colors = {layer: palette(scale(place)) for place, layer in enumerate(layers)}
    begin, end = request.window
    zero = begin if request.compute_begin is None else request.compute_begin
    if request.compute_end is not None:  # a long queue would leave no room for the rest
        begin = max(begin, zero - (request.compute_end - zero) / 4)
    figure = Figure(figsize=(12, 2.4 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for y, (_, row) in enumerate(shown):
        visible = [each for each in row if each[0].end >= begin and each[0].ts <= end]
        visible = sorted(visible, key=lambda each: not each[1])[:_MAX_BARS]
        axes.broken_barh(
            [((event.ts - zero) / 1000, event.dur / 1000) for event, _ in visible],
            (y - 0.4, 0.8),
            facecolors=[colors[event.args.layer] if is_mine else "0.88" for event, is_mine in visible],
            edgecolors="white",
            linewidth=0.3,
        )
    moments = (
        (request.issued, "decode takes blocks", "0.4"),
        (request.compute_end, "forward pass ends", "tab:red"),
        (request.ready, "decode is ready", "tab:green"),
    )
    for at, label, color in moments:
        if at is not None and begin <= at <= end:
            axes.axvline((at - zero) / 1000, label=label, color=color, linestyle="--")
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    margin = max(0.02 * (end - begin), 1.0)
    axes.set_xlim((begin - margin - zero) / 1000, (end + margin - zero) / 1000)
    axes.set_xlabel("ms since the first layer began")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=len(moments), frameon=False)
    if layers:
        figure.colorbar(ScalarMappable(scale, palette), ax=axes, label="layer", pad=0.01)
    figure.suptitle(headline(request).replace("$", r"\$"), fontweight="bold")
    figure.savefig(path, format="png", dpi=100)
