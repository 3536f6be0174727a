# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd doctor` finds and how it prints it. `--json` prints a `DoctorReport` as it stands here."""

from __future__ import annotations

import enum
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.core.text import one_line

SCHEMA = 2
"""Grows when a field or a check changes its meaning or goes. Fields, checks and figures may be added without."""

_CHARS = 1000
_WIDTH = 120
_QUIET_S = 1.0


class Level(enum.Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing: something was not checked, or is unusual and may be meant so."""
    WARNING = "warning"
    """Works, but not well, or not in every case."""
    ERROR = "error"
    """Does not work."""


_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}

Figure = int | float | str | bool


class Finding(msgspec.Struct, frozen=True):
    """One result of a check."""

    check: str  # names the check, as `area.subject`; a stable name
    level: Level
    found: str  # one line
    action: str = ""  # what to do; present for every warning and error
    figures: dict[str, Figure] = {}  # measured values, in bytes and seconds

    def __post_init__(self) -> None:
        if "\n" in self.found or "\n" in self.action:
            raise ValueError(f"more than a line: {self.found!r}, {self.action!r}")
        if self.level in (Level.WARNING, Level.ERROR) and not self.action:
            raise ValueError(f"{self.check} does not say what to do: {self.found}")


class DoctorReport(msgspec.Struct, frozen=True):
    """All findings."""

    schema: int
    target: Literal["machine", "pair"]
    ok: bool  # whether there is no error
    counts: dict[Level, int]  # findings by level, including levels without findings
    findings: tuple[Finding, ...]


def make_report(target: Literal["machine", "pair"], findings: Iterable[Finding]) -> DoctorReport:
    found = tuple(findings)
    counts = {level: sum(finding.level is level for finding in found) for level in Level}
    return DoctorReport(SCHEMA, target, counts[Level.ERROR] == 0, counts, found)


def ok(check: str, found: str, **figures: Figure) -> Finding:
    return finding(Level.OK, check, found, "", **figures)


def note(check: str, found: str, action: str = "", **figures: Figure) -> Finding:
    return finding(Level.NOTE, check, found, action, **figures)


def warning(check: str, found: str, action: str, **figures: Figure) -> Finding:
    return finding(Level.WARNING, check, found, action, **figures)


def error(check: str, found: str, action: str, **figures: Figure) -> Finding:
    return finding(Level.ERROR, check, found, action, **figures)


def finding(level: Level, check: str, found: str, action: str, **figures: Figure) -> Finding:
    """Texts may hold what tools, files and servers say, so they are cleaned and cut here."""
    bounded = {name: one_line(value, _CHARS) if isinstance(value, str) else value for name, value in figures.items()}
    return Finding(check, level, one_line(found, _CHARS), one_line(action, _CHARS), bounded)


def show(report: DoctorReport, as_json: bool) -> None:
    """Prints to standard output. Texts have colours on a terminal."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for each in report.findings:
        text = Text(each.found)
        if each.action:
            text.append(f"\n-> {each.action}", "bold" if each.level is Level.ERROR else "")
        table.add_row(Text(each.level.value, _STYLES[each.level]), each.check, text)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
    errors, warnings, notes = (_many(report.counts, level) for level in (Level.ERROR, Level.WARNING, Level.NOTE))
    print(f"\n{errors}, {warnings}, {notes}; {report.counts[Level.OK]} ok")


def _many(counts: dict[Level, int], level: Level) -> str:
    return f"{counts[level]} {level.value}{'' if counts[level] == 1 else 's'}"


@contextmanager
def step(what: str) -> Iterator[None]:
    """Names a step on standard error if it takes longer than a second."""
    timer = threading.Timer(_QUIET_S, print, [f"{what} ..."], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
