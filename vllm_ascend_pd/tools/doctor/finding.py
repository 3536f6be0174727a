# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd doctor` finds; `--json` prints a `Report` as it stands here."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from vllm_ascend_pd.core.text import one_line

SCHEMA = 1
"""Grows when a field changes its meaning or goes; fields, checks and figures may be added without."""


class Level(enum.Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing: something was not checked, or is unusual and may be meant so."""
    WARNING = "warning"
    """Works, but not well, or not in every case."""
    ERROR = "error"
    """Does not work."""


class DoctorTarget(enum.Enum):
    MACHINE = "machine"
    PAIR = "pair"


_CHARS = 1000

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
    target: DoctorTarget
    ok: bool  # whether there is no error
    counts: dict[Level, int]  # findings by level, including levels without findings
    findings: tuple[Finding, ...]


def make_report(target: DoctorTarget, findings: Iterable[Finding]) -> DoctorReport:
    found = tuple(findings)
    counts = {level: sum(finding.level is level for finding in found) for level in Level}
    return DoctorReport(SCHEMA, target, counts[Level.ERROR] == 0, counts, found)


def ok(check: str, found: str, **figures: Figure) -> Finding:
    return _finding(check, Level.OK, found, "", figures)


def note(check: str, found: str, action: str = "", **figures: Figure) -> Finding:
    return _finding(check, Level.NOTE, found, action, figures)


def warning(check: str, found: str, action: str, **figures: Figure) -> Finding:
    return _finding(check, Level.WARNING, found, action, figures)


def error(check: str, found: str, action: str, **figures: Figure) -> Finding:
    return _finding(check, Level.ERROR, found, action, figures)


def _finding(check: str, level: Level, found: str, action: str, figures: dict[str, Figure]) -> Finding:
    """Texts may hold what tools, files and servers say."""
    bounded = {name: one_line(value, _CHARS) if isinstance(value, str) else value for name, value in figures.items()}
    return Finding(check, level, one_line(found, _CHARS), one_line(action, _CHARS), bounded)
