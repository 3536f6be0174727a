# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md and CONTRIBUTING.md from benchmarks/results/*.json, in place.

A results file has a `question`, its `latest` figures (date, case, figure, bar and state: true if the bar holds), which
are the rows of docs/performance.md, and the `tables` of the runs that they are from. `ci.json` has the times of all
stages of the tests, which `scripts/test.sh --durations` writes and CONTRIBUTING.md shows.
"""

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "performance.md"
STAGES_PAGE = REPOSITORY / "CONTRIBUTING.md"
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


def stages(ci: dict[str, Any]) -> str:
    """Markdown. Lanes run beside each other."""
    lines = ["| stage | lane | seconds |", "|---|---|---|"]
    lines += [f"| {each['stage']} | {each['lane']} | {each['seconds']} |" for each in ci["stages"]]
    return "\n".join([*lines, f"| **all, on {ci['machine']}, {ci['date']}** | | **{ci['seconds']}** |"])


def filled(path: Path) -> str:
    """Returns the page with its table as the results have it."""
    if path == STAGES_PAGE:
        made = stages(json.loads((RESULTS / "ci.json").read_text()))
    else:
        made = table([json.loads((RESULTS / f"{name}.json").read_text()) for name in ORDER])
    return _PLACE.sub(lambda found: f"{found[1]}\n{made}\n\n{found[2]}", path.read_text())


if __name__ == "__main__":
    for path in (PAGE, STAGES_PAGE):
        path.write_text(filled(path))
