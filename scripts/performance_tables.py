# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/*.md from benchmarks/results/*.json, in place.

A results file has a `question` and `tables`: each has a date, a machine, the command, columns (key of a row -> heading)
and rows. A page has `<!-- table FILE.TABLE -->` where one belongs, and `<!-- end -->` behind it.
"""

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
RESULTS = REPOSITORY / "benchmarks" / "results"

_PLACE = re.compile(r"(<!-- table (\w+)\.(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case True:
            return "holds"
        case False:
            return "**missed**"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def table(results: dict[str, Any]) -> str:
    """Markdown: a line with date, machine and command, and the rows. Numbers are on the right."""
    columns = results["columns"]
    numbers = [
        all(isinstance(row[key], int | float | None) and not isinstance(row[key], bool) for row in results["rows"])
        for key in columns
    ]
    lines = [
        f"{results['date']}, {results['machine']} (`{results['command']}`):",
        "",
        f"| {' | '.join(columns.values())} |",
        f"|{'|'.join('---:' if number else '---' for number in numbers)}|",
        *(f"| {' | '.join(cell(row[key]) for key in columns)} |" for row in results["rows"]),
    ]
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with its tables made anew. Raises KeyError or OSError for one that there is no data for."""

    def place(found: re.Match[str]) -> str:
        results = json.loads((RESULTS / f"{found[2]}.json").read_text())["tables"][found[3]]
        return f"{found[1]}\n{table(results)}\n\n{found[4]}"

    return _PLACE.sub(place, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
