# SPDX-License-Identifier: Apache-2.0
"""Tables of measurements in docs/ are those of benchmarks/results, and every benchmark has results there."""

import datetime
import json
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "scripts"))

from performance_tables import PAGES, RESULTS, filled, table  # noqa: E402

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_what_the_files_have(page: Path) -> None:
    assert page.read_text() == filled(page.read_text()), "run python scripts/performance_tables.py"


def test_every_table_is_on_one_page() -> None:
    on_page = sorted(name for page in PAGES for name in re.findall(r"<!-- table (\w+\.\w+) -->", page.read_text()))
    names = [f"{file.stem}.{name}" for file in RESULTS.iterdir() for name in json.loads(file.read_text())["tables"]]
    assert sorted(names) == on_page


def test_every_benchmark_has_results() -> None:
    programs = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert programs - {"ops"} <= {path.stem for path in RESULTS.glob("*.json")}  # ops: a part of regroup


@pytest.mark.parametrize("file", sorted(RESULTS.iterdir()), ids=lambda file: file.stem)
def test_results_say_when_and_where(file: Path) -> None:
    results = json.loads(file.read_text())
    assert results["question"].endswith("?")
    for each in results["tables"].values():
        datetime.date.fromisoformat(each["date"].split()[0])
        assert each["machine"]
        assert (REPOSITORY / re.findall(r"benchmarks/\S+\.py", each["command"])[0]).exists()
        assert all(row.keys() >= each["columns"].keys() for row in each["rows"])


def test_cells() -> None:
    rows = [{"a": 1000, "b": "x", "c": True}, {"a": 2.5, "b": None, "c": False}]
    results = {
        "date": "2026-01-02",
        "machine": "M",
        "command": "run",
        "columns": {"a": "A", "b": "B", "c": ""},
        "rows": rows,
    }
    assert table(results).splitlines() == [
        "2026-01-02, M (`run`):",
        "",
        "| A | B |  |",
        "|---:|---|---|",
        "| 1,000 | x | holds |",
        "| 2.5 |  | **missed** |",
    ]
