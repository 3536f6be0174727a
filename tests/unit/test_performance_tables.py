# SPDX-License-Identifier: Apache-2.0
"""The table of docs/performance.md is made of benchmarks/results, and every benchmark has results there."""

import datetime
import json
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "scripts"))

from performance_tables import ORDER, PAGE, RESULTS, filled  # noqa: E402


def test_the_page_has_what_the_files_have() -> None:
    assert PAGE.read_text() == filled(PAGE.read_text()), "run python scripts/performance_tables.py"


def test_every_benchmark_has_results_that_say_when_and_where() -> None:
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    assert programs == set(ORDER) == {path.stem for path in RESULTS.glob("*.json")}
    for file in RESULTS.glob("*.json"):
        results = json.loads(file.read_text())
        for row in results["latest"]:
            datetime.date.fromisoformat(row["date"])
        for each in results["tables"].values():
            assert each["machine"]
            assert (REPOSITORY / re.findall(r"benchmarks/\S+\.py", each["command"])[0]).exists()
            assert all(row.keys() >= each["columns"].keys() for row in each["rows"])
