# SPDX-License-Identifier: Apache-2.0
"""Draws the timeline of one request as a PNG. Only this module needs matplotlib."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm_ascend_pd.tools.timeline.picture import Bar, Picture, Row, explanation, headline

_MS = 1000.0
_MAX_ROWS = 40
_OTHERS = "0.88"
_REST = "0.6"
_LABEL_ROWS = 0.45
"""Distance between two label heights, in rows."""
_GAP = 6
"""Distance between two labels of one height, in pixels."""


def draw_png(picture: Picture, note: str, path: Path) -> None:
    """Raises ImportError without matplotlib, OSError if the file cannot be written."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("MPLCONFIGDIR", scratch)  # otherwise matplotlib writes its cache to the user's home
        logging.getLogger("matplotlib.font_manager").setLevel(
            logging.ERROR
        )  # otherwise it logs that it builds the cache
        _draw(picture, note, path)


def _draw(picture: Picture, note: str, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = picture.rows[: _MAX_ROWS - 1] + picture.rows[-1:] if len(picture.rows) > _MAX_ROWS else picture.rows
    figure = Figure(figsize=(12, 1.9 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    last = max(1, len(picture.layers) - 1)
    palette = [colormaps["viridis"](0.08 + 0.84 * place / last) for place in range(len(picture.layers))]
    request, zero = picture.request, picture.begin
    zero = request.compute_begin if request.compute_begin is not None else zero
    for y, row in enumerate(rows):
        if row.kind == "request":
            _draw_arrivals(axes, y, picture, zero)
        else:
            _draw_row(axes, y, row, palette, picture, zero)
    axes.set_yticks(range(len(rows)), [_plain(row.title) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -1.0)
    axes.set_xlim((picture.begin - zero) / _MS, (picture.end - zero) / _MS)
    axes.set_xlabel(_plain(f"ms since the first layer began ({note})"))
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.suptitle(_plain(headline(request)), fontsize=12, fontweight="bold")
    axes.set_title(_plain(explanation(picture)), fontsize=9, color="0.3")
    _draw_moments(figure, axes, picture, zero, len(rows))  # last, because the free space depends on the rest
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})


def _draw_row(axes: Any, y: int, row: Row, palette: list[Any], picture: Picture, zero: float) -> None:
    height = {"compute": 0.84, "regroup": 0.5, "push": 0.66}[row.kind]
    width = picture.end - picture.begin
    shown = [bar for bar in row.bars if bar.end >= picture.begin and bar.begin <= picture.end]
    axes.broken_barh(
        [((bar.begin - zero) / _MS, max(bar.end - bar.begin, width / 1500) / _MS) for bar in shown],
        (y - height / 2, height),
        facecolors=[_color(bar, palette) for bar in shown],
        edgecolors="white",
        linewidth=0.5,
        hatch="//" if row.kind == "regroup" else None,
    )
    for bar in shown:
        if bar.mine and bar.end - bar.begin > 0.012 * width * max(1, len(bar.label)):
            dark = sum(palette[bar.layer][:3]) < 1.6
            axes.text(
                ((bar.begin + bar.end) / 2 - zero) / _MS,
                y,
                _plain(bar.label),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
                clip_on=True,
            )


def _draw_arrivals(axes: Any, y: int, picture: Picture, zero: float) -> None:
    """Draws a row that fills as bytes arrive."""
    times = [picture.begin, *(arrival.at for arrival in picture.arrivals), picture.end]
    shares = [0.0, *(arrival.share for arrival in picture.arrivals)]
    shares.append(shares[-1])
    bottom, height = y + 0.4, 0.8
    x = [(time - zero) / _MS for time in times]
    axes.fill_between(x, bottom, [bottom - height * s for s in shares], step="post", color="tab:orange", alpha=0.35)
    axes.step(x, [bottom - height * s for s in shares], where="post", color="tab:orange", linewidth=1.5)


def _draw_moments(figure: Any, axes: Any, picture: Picture, zero: float, rows: int) -> None:
    request = picture.request
    moments = [
        (at, label, color)
        for at, label, color in (
            (request.issued, "ticket", "0.4"),
            (request.compute_end, "forward pass ends", "tab:red"),
            (request.ready, "decode is ready", "tab:green"),
        )
        if at is not None and picture.begin <= at <= picture.end
    ]
    moments.sort(key=lambda moment: moment[0])
    texts = []
    for at, label, color in moments:
        x = (at - zero) / _MS
        axes.vlines(x, -0.55, rows - 0.5, color=color, linewidth=1.4, linestyle="--", zorder=3)
        texts.append(axes.text(x, -0.68, label, va="center", color=color, fontsize=9, in_layout=False))
    if request.compute_end is not None and request.ready is not None:
        late = request.ready > request.compute_end
        axes.axvspan(
            (request.compute_end - zero) / _MS,
            (request.ready - zero) / _MS,
            color="tab:red" if late else "tab:green",
            alpha=0.07,
            linewidth=0,
        )
    figure.draw_without_rendering()  # determines the size and place of texts
    left, right = (axes.transData.transform((x, 0))[0] for x in axes.get_xlim())
    places = place_labels(
        [
            (axes.transData.transform((text.get_position()[0], 0))[0], text.get_window_extent().width, text.get_text())
            for text in texts
        ],
        left,
        right,
    )
    for text, (side, level) in zip(texts, places, strict=True):
        text.set_horizontalalignment(side)
        text.set_y(-0.68 - _LABEL_ROWS * level)
    highest = max((level for _, level in places), default=0)
    axes.set_ylim(rows - 0.4, -1.0 - _LABEL_ROWS * highest)


def place_labels(labels: list[tuple[float, float, str]], left: float, right: float) -> list[tuple[str, int]]:
    """Returns how each label is aligned and how many lines up it is, so that no label overlaps another or the border.

    labels: (place of its line, width, text), in the order of their lines.
    left, right: the picture's border.

    Of two neighbouring lines, the first one's label ends at its line and the second one's begins there, so both have
    room. A label without room moves one up.
    """
    taken: list[tuple[int, float, float]] = []
    places = []
    for number, (at, width, text) in enumerate(labels):
        sides = ["left", "right"] if text == "ticket" or number == len(labels) - 1 else ["right", "left"]
        spans = [(side, at, at + width) if side == "left" else (side, at - width, at) for side in sides]
        fitting = [span for span in spans if left <= span[1] and span[2] <= right] or spans[:1]
        level, side, begin, end = next(
            (level, side, begin, end)
            for level in range(len(labels))
            for side, begin, end in fitting
            if all(level != one or end + _GAP <= first or last + _GAP <= begin for one, first, last in taken)
        )
        taken.append((level, begin, end))
        places.append((side, level))
    return places


def _color(bar: Bar, palette: list[Any]) -> Any:
    if not bar.mine:
        return _OTHERS
    return _REST if bar.layer < 0 else palette[bar.layer]


def _plain(text: str) -> str:
    """Escapes what matplotlib would render as mathematics."""
    return text.replace("$", r"\$")
