# SPDX-License-Identifier: Apache-2.0
"""The samples as a picture."""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.soak.samples import MIB, Sample

PANELS = (
    ("resident memory (MiB)", lambda sample: sample.resident_bytes / MIB),
    ("KV blocks in use", lambda sample: sample.used_blocks),
    ("threads", lambda sample: sample.threads),
    ("open files", lambda sample: sample.files),
)


def plot(samples: Sequence[Sample], restarts: Sequence[tuple[float, float]], title: str, path: Path) -> None:
    """A PNG: one panel per quantity, one line per server. Grey: from an engine's end until it was back."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("MPLCONFIGDIR", scratch)  # else it leaves its cache in the user's home
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it would say that it makes that cache
        _draw(samples, restarts, title, path)


def _draw(samples: Sequence[Sample], restarts: Sequence[tuple[float, float]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    begin, end = min(sample.at for sample in samples), max(sample.at for sample in samples)
    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True)
    for panel, (label, quantity) in zip(axes, PANELS, strict=True):
        for server in dict.fromkeys(sample.server for sample in samples):
            points = [(s.at, quantity(s), s.pid) for s in samples if s.server == server and quantity(s) is not None]
            if points:
                minutes, values = _with_gaps(points, begin)
                panel.plot(minutes, values, label=server, linewidth=1)
        for killed, back in restarts:
            panel.axvspan((killed - begin) / 60, (min(back, end) - begin) / 60, color="0.85")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")  # inside it covers curves
    axes[-1].set_xlabel("minutes")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=80)


def _with_gaps(points: Sequence[tuple[float, float, int]], begin: float) -> tuple[list[float], list[float]]:
    """Lines do not go on from one life of a server to the next."""
    minutes: list[float] = []
    values: list[float] = []
    last_pid = None
    for at, value, pid in points:
        minute = (at - begin) / 60
        if pid != last_pid is not None:
            minutes.append(minute)
            values.append(float("nan"))
        minutes.append(minute)
        values.append(value)
        last_pid = pid
    return minutes, values
