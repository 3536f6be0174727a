# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md, docs/proxy.md and CONTRIBUTING.md, in place.

docs/performance.md and CONTRIBUTING.md have theirs from benchmarks/results/*.json. A results file has a `question`, its
`latest` figures (date, case, figure, bar and state: true if the bar holds), which are the rows of docs/performance.md,
and the `tables` of the runs that they are from. `ci.json` has the times of all stages of the tests, which
`scripts/test.sh --durations` writes. docs/proxy.md has engines' answers by `vllm_ascend_pd/proxy/routing/answers.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

from vllm_ascend_pd.proxy.routing.answers import RULES

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
ORDER = (
    *("ttft", "who_computes", "reservation", "plan", "descriptors", "regroup", "push", "overlap", "scale", "waiting"),
    *("proxy_overhead", "proxy_stalls", "attacks"),
)

_PLACE = re.compile(r"(<!-- (?:table|answers) -->\n).*?(<!-- end -->)", re.DOTALL)
_STATES = {True: "holds", False: "**missed**", None: ""}


def performance() -> str:
    """Markdown. A question stands in the first of its rows."""
    lines = ["| question | case | latest figure | bar | |", "|---|---|---|---|---|"]
    for each in [_results(name) for name in ORDER]:
        question = each["question"]
        for row in each["latest"]:
            state = row["state"] if isinstance(row["state"], str) else _STATES[row["state"]]
            lines.append(f"| {question} | {row['case']} | {row['figure']} | {row['bar']} | {state} |")
            question = ""
    return "\n".join(lines)


def stages() -> str:
    """Markdown. Lanes run beside each other."""
    ci = _results("ci")
    lines = ["| stage | lane | seconds |", "|---|---|---|"]
    lines += [f"| {each['stage']} | {each['lane']} | {each['seconds']} |" for each in ci["stages"]]
    return "\n".join([*lines, f"| **all, on {ci['machine']}, {ci['date']}** | | **{ci['seconds']}** |"])


def answers() -> str:
    """Markdown."""
    lines = ["| engine | the proxy sees | failure | others asked | then | counts against it |", f"|{'---|' * 6}"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for (role, kind), rule in RULES.items():
        then = f"{rule.then.value} *" if rule.again else rule.then.value
        rows.setdefault((rule.seen, kind.value, rule.asks.value, then, rule.counts.value), []).append(role.value)
    lines += [f"| {' | '.join((roles[0] if len(roles) == 1 else 'both', *row))} |" for row, roles in rows.items()]
    return "\n".join(lines)


PAGES = {
    REPOSITORY / "docs" / "performance.md": performance,
    REPOSITORY / "CONTRIBUTING.md": stages,
    REPOSITORY / "docs" / "proxy.md": answers,
}


def filled(path: Path) -> str:
    """Returns the page with its table made anew."""
    made = PAGES[path]()
    return _PLACE.sub(lambda found: f"{found[1]}\n{made}\n\n{found[2]}", path.read_text())


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path))
