# SPDX-License-Identifier: Apache-2.0
"""The table of a run: one row for each fault."""

import dataclasses
from collections import Counter

COLUMNS = (
    "fault",
    "requests",
    "right",
    "failed cleanly",
    "failed unclearly",
    "left by client",
    "wrong",
    "hung",
    "leaked blocks",
    "other leaks",
    "memory, MiB",
    "seconds to recover",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault and what followed.

    number: the number of the kind of fault.
    recovery_s: seconds from the end of the fault to the first right answer. What was killed is healthy again then.
    leaks: threads, sockets, files and processes more than before.
    memory_growth: bytes, by server.
    """

    number: int
    name: str
    where: str
    outcomes: dict[str, int]
    leaked_blocks: int
    leaks: dict[str, int]
    recovery_s: float
    memory_growth: dict[str, int] = dataclasses.field(default_factory=dict)
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    def cells(self) -> tuple[str, ...]:
        count = Counter(self.outcomes)
        return (
            f"{self.number}. {self.name}",
            str(self.requests),
            str(count["right"]),
            str(count["failed cleanly"]),
            str(count["failed without a reason"] + count["connection broken"]),
            str(count["client left"]),
            str(count["wrong"]),
            str(count["hung"]),
            str(self.leaked_blocks),
            str(sum(self.leaks.values())),
            f"{sum(self.memory_growth.values()) / (1 << 20):+.0f}",
            f"{self.recovery_s:.1f}",
        )


class Report:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def _sections(self) -> dict[str, list[Row]]:
        sections: dict[str, list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.number):
            sections.setdefault(row.where, []).append(row)
        return sections

    def total(self) -> tuple[str, ...]:
        columns = list(zip(*(row.cells() for row in self.rows), strict=True))
        sums = [str(sum(int(cell) for cell in column)) for column in columns[1:-2]]
        return ("total", *sums, "", f"{max(row.recovery_s for row in self.rows):.1f} at most")

    def markdown(self) -> str:
        lines = []
        for where, rows in self._sections().items():
            lines += [f"**{where}**", "", _line(COLUMNS), _line(["---"] + ["---:"] * (len(COLUMNS) - 1))]
            lines += [*(_line(row.cells()) for row in rows), ""]
        return "\n".join([*lines, _line(COLUMNS), _line(["---"] * len(COLUMNS)), _line(self.total()), ""])


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return "| " + " | ".join(cells) + " |"
