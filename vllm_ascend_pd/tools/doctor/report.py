# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd doctor` finds and how it prints it. `--json` prints a `DoctorReport` as it stands here."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from functools import partial
from typing import Literal

import msgspec

from vllm_ascend_pd.core.text import one_line

SCHEMA = 2
"""Grows when a field or a check changes its meaning or goes. Fields, checks and figures may be added without."""

_CHARS = 1000


class Level(enum.Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing: something was not checked, or is unusual and may be meant so."""
    WARNING = "warning"
    """Works, but not well, or not in every case."""
    ERROR = "error"
    """Does not work."""


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


def finding(level: Level, check: str, found: str, action: str = "", **figures: Figure) -> Finding:
    """Texts may hold what tools, files and servers say, so they are cleaned and cut here."""
    bounded = {name: one_line(value, _CHARS) if isinstance(value, str) else value for name, value in figures.items()}
    return Finding(check, level, one_line(found, _CHARS), one_line(action, _CHARS), bounded)


ok = partial(finding, Level.OK)
note = partial(finding, Level.NOTE)
warning = partial(finding, Level.WARNING)
error = partial(finding, Level.ERROR)


def show(report: DoctorReport) -> None:
    """Prints to standard output."""
    width = max(len(each.check) for each in report.findings)
    for each in report.findings:
        print(f"{each.level.value:<7}  {each.check:<{width}}  {each.found}")
        if each.action:
            print(f"{'':<{width + 11}}-> {each.action}")
    errors, warnings, notes = (_many(report.counts, level) for level in (Level.ERROR, Level.WARNING, Level.NOTE))
    print(f"\n{errors}, {warnings}, {notes}; {report.counts[Level.OK]} ok")


def _many(counts: dict[Level, int], level: Level) -> str:
    return f"{counts[level]} {level.value}{'' if counts[level] == 1 else 's'}"


def progress(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)
