# SPDX-License-Identifier: Apache-2.0
"""The labels of a picture's moments, as they are drawn: none on another, whatever comes first."""

import itertools
from pathlib import Path

import pytest

from vllm_ascend_pd.tools.timeline import png
from vllm_ascend_pd.tools.timeline.picture import Bar, Picture, Row, _window
from vllm_ascend_pd.tools.timeline.summary import Request

pytest.importorskip("matplotlib")

BEGIN, END = 2_000.0, 52_000.0


def a_picture(ready: float, issued: float = 0.0) -> Picture:
    layers = [f"layers.{n}" for n in range(8)]
    spans = [(BEGIN + (END - BEGIN) * n / 8, BEGIN + (END - BEGIN) * (n + 1) / 8) for n in range(8)]
    bars = [Bar(begin, end, n, str(n), True) for n, (begin, end) in enumerate(spans)]
    request = Request("f00d", issued=issued, computed=[(BEGIN, END)], bytes=200, bytes_before_end=150, ready=ready)
    begin, end = _window(request)
    rows = [Row("compute", "P0 computes", bars), Row("push", "P0 pushes to D0", bars), Row("request", "D has", [])]
    return Picture(rows, layers, request, [], begin, end, 0)


@pytest.mark.parametrize(
    ("ready", "issued"),
    [
        (END - 30_000, 0.0),
        (END - 400, 0.0),
        (END, 0.0),
        (END + 400, 0.0),
        (END + 60_000, 0.0),
        (BEGIN + 10, 0.0),
        (BEGIN + 10, BEGIN - 10),
        (BEGIN + 2_000, BEGIN - 10),
        (END + 3_000_000, 0.0),
    ],
    ids=[
        "much earlier",
        "a little earlier",
        "at once",
        "a little later",
        "much later",
        "at the left edge",
        "all at the left edge",
        "near the left edge",
        "prefill in no time",
    ],
)
def test_labels_do_not_lie_on_each_other(
    ready: float, issued: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    png.draw_png(a_picture(ready, issued), "one clock", tmp_path / "timeline.png")
    [figure] = drawn
    [axes] = figure.axes
    labels = {"ticket", "forward pass ends", "decode is ready"}
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text() in labels}
    assert set(boxes) == labels
    for (one, box), (other, beside) in itertools.combinations(boxes.items(), 2):
        assert not box.overlaps(beside), (one, other)
    title = axes.title.get_window_extent()
    for label, box in boxes.items():
        assert axes.bbox.x0 - 1 <= box.x0 < box.x1 <= axes.bbox.x1 + 1, label
        assert not box.overlaps(title), label
