# SPDX-License-Identifier: Apache-2.0
"""The tables of pages are as scripts/page_tables.py makes them. Every benchmark has its results."""

import datetime
import json
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "scripts"))

from page_tables import ORDER, PAGES, RESULTS, filled  # noqa: E402


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_has_what_the_files_have(page: Path) -> None:
    assert page.read_text() == filled(page), "run python scripts/page_tables.py"


def test_every_benchmark_has_results_that_say_when_and_where() -> None:
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    assert {*programs, "ci"} == {*ORDER, "ci"} == {path.stem for path in RESULTS.glob("*.json")}
    for name in ORDER:
        results = json.loads((RESULTS / f"{name}.json").read_text())
        for row in results["latest"]:
            datetime.date.fromisoformat(row["date"])
        for each in results["tables"].values():
            assert each["machine"]
            assert (REPOSITORY / re.findall(r"benchmarks/\S+\.py", each["command"])[0]).exists()
            assert all(row.keys() >= each["columns"].keys() for row in each["rows"])
