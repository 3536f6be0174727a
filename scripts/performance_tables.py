# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/performance.md from benchmarks/results/*.json, in place.

A results file has a `question`, its `latest` figures (date, case, figure, bar and state: true if the bar holds), which
are the page's rows, and the `tables` of the runs that they are from.
"""

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "performance.md"
RESULTS = REPOSITORY / "benchmarks" / "results"
ORDER = (
    "ttft",
    "who_computes",
    "plan",
    "descriptors",
    "regroup",
    "push",
    "overlap",
    "token_ids",
    "scale",
    "proxy_overhead",
)

_PLACE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
_STATES = {True: "holds", False: "**missed**", None: ""}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown. A question stands in the first of its rows."""
    lines = ["| question | case | latest figure | bar | | date |", "|---|---|---|---|---|---|"]
    for each in results:
        question = each["question"]
        for row in each["latest"]:
            state = row["state"] if isinstance(row["state"], str) else _STATES[row["state"]]
            lines.append(
                f"| {question} | {row['case']} | {row['figure']} | {row['bar']} | {state} | {row['date']} |".replace(
                    "|  |", "| |"
                )
            )
            question = ""
    return "\n".join(lines)


def filled(page: str) -> str:
    results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ORDER]
    return _PLACE.sub(lambda found: f"{found[1]}\n{table(results)}\n\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
