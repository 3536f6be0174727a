# SPDX-License-Identifier: Apache-2.0
"""Writes the table of engines' answers in docs/proxy.md from `vllm_ascend_pd/proxy/routing/answers.py`, in place."""

import re
from pathlib import Path

from vllm_ascend_pd.proxy.routing.answers import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "proxy.md"
COLUMNS = (
    "engine",
    "the proxy sees",
    "failure",
    "others asked with the same request",
    "then",
    "the same engine again",
    "counts against it",
)

_PLACE = re.compile(r"(<!-- answers -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for (role, kind), rule in RULES.items():
        again = "if no other is left" if rule.again else "no"
        before = (role.value, rule.seen, kind.value)
        rows.append((*before, rule.asks.value, rule.then.value, again, rule.counts.value))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace("| --- ", "|---").replace("--- |", "---|")


def page() -> str:
    """The page with its table made anew."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{table()}\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
