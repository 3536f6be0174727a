# SPDX-License-Identifier: Apache-2.0
"""Prints a report as text."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.tools.doctor.finding import DoctorReport, Finding, Level

_WIDTH = 120
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def show(report: DoctorReport) -> None:
    """Prints to standard output, with colours on a terminal."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row(Text(finding.level.value, _STYLES[finding.level]), finding.check, _text(finding))
    counts = report.counts
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
    print(
        f"\n{_many(counts[Level.ERROR], 'error')}, {_many(counts[Level.WARNING], 'warning')}, "
        f"{_many(counts[Level.NOTE], 'note')}; {counts[Level.OK]} ok"
    )


def _text(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.action:
        text.append(f"\n-> {finding.action}", "bold" if finding.level is Level.ERROR else "")
    return text


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
