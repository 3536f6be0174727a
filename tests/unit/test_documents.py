# SPDX-License-Identifier: Apache-2.0
"""The documents: links, anchors and paths lead somewhere, what is generated is up to date, and the pages name all that
there is."""

import datetime
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from harness.documented import PAGES, REPOSITORY, lines
from vllm_ascend_pd.core.reasons import PushFailure, ReceiveFailure
from vllm_ascend_pd.proxy.routing.answers import FailureKind

sys.path.append(str(REPOSITORY / "scripts"))

from page_tables import ORDER, RESULTS, filled
from page_tables import PAGES as PAGES_WITH_TABLES

PACKAGE = REPOSITORY / "vllm_ascend_pd"
CHINESE = REPOSITORY / "README.zh-CN.md"
ALL_PAGES = [*PAGES, CHINESE, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FOLDERS = "docs|tests|scripts|examples|benchmarks|vllm_ascend_pd|csrc|requirements"
PATH = re.compile(rf"`((?:{FOLDERS})/[^\s`*{{<]+)`")
MODULE = re.compile(r"`([a-z_]+/[a-z_/0-9]+\.py)(?=[`,: ])")


def prose(page: Path) -> str:
    """Without fences."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        while anchor in found:
            anchor += "-1"
        found.add(anchor)
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for target, anchor in LINK.findall(prose(page)):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_paths_are_there(page: Path) -> None:
    """Whole ones, and those of modules below `vllm_ascend_pd/`."""
    assert [path for path in PATH.findall(prose(page)) if not (REPOSITORY / path).exists()] == []
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    modules = [path for path in MODULE.findall(prose(page)) if path.partition("/")[0] in rooms]
    assert [path for path in modules if not (PACKAGE / path).exists()] == []


def test_the_chinese_readme_has_the_same_content() -> None:
    """The same commands, figures, links and number of sections and rows."""
    english = REPOSITORY / "README.md"
    assert lines(CHINESE) == lines(english)
    assert re.findall(r"\d+%?", prose(CHINESE)) == re.findall(r"\d+%?", prose(english))

    def shape(page: Path) -> tuple[list[str], list[str], int]:
        text = page.read_text()
        targets = sorted(
            f"{target}#{anchor}" for target, anchor in LINK.findall(text) if not target.startswith("README")
        )
        return targets, re.findall(r"^#+", text, re.MULTILINE), len(re.findall(r"^\|", text, re.MULTILINE))

    assert shape(CHINESE) == shape(english)


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set(), [REPOSITORY / "README.md"]
    while new:
        page = new.pop()
        reached.add(page)
        targets = ((page.parent / target).resolve() for target, _ in LINK.findall(page.read_text()) if target)
        new += [file for file in targets if file.suffix == ".md" and file.exists() and file not in reached]
    assert {
        str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").glob("*.md") if page not in reached
    } == set()


def test_the_support_matrix_has_every_test_with_engines() -> None:
    linked = set(re.findall(r"\]\(\.\./(tests/\S+?\.py)\)", (REPOSITORY / "docs" / "support-matrix.md").read_text()))
    tests = {
        str(file.relative_to(REPOSITORY))
        for folder in ("tests/e2e", "tests/npu/e2e")
        for file in (REPOSITORY / folder).glob("test_*.py")
    }
    assert {file for file in tests if "benchmark" not in file} - linked == set()


# --- what is generated --------------------------------------------------------------------------------------


def test_the_configurations_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(REPOSITORY / "scripts" / "config_reference.py"))
    assert made["PAGE"].read_text() == made["page"](), "run scripts/config_reference.py"


@pytest.mark.parametrize("page", PAGES_WITH_TABLES, ids=lambda page: page.name)
def test_the_page_has_what_the_files_have(page: Path) -> None:
    assert page.read_text() == filled(page), "run python scripts/page_tables.py"


def test_every_benchmark_has_results_that_say_when_and_where() -> None:
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    others = {"ci", "first_hours"}  # scripts/test.sh and scripts/first_hours.sh make them
    assert {*programs, *others} == {*ORDER, *others} == {path.stem for path in RESULTS.glob("*.json")}
    for name in ORDER:
        results = json.loads((RESULTS / f"{name}.json").read_text())
        for row in results["latest"]:
            datetime.date.fromisoformat(row["date"])
        for each in results["tables"].values():
            assert each["machine"]
            assert (REPOSITORY / re.findall(r"benchmarks/\S+\.py", each["command"])[0]).exists()
            assert all(row.keys() >= each["columns"].keys() for row in each["rows"])


# --- what is named -----------------------------------------------------------------------------------------

ALERTS = yaml.safe_load((REPOSITORY / "examples" / "observability" / "alerts.yml").read_text())


def first_column(title: str) -> list[str]:
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    [section] = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(\w+)` \|(?: [^|]+\S \|)+$", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("title", "values"),
    [
        ("Attempts at an engine", [kind.value.replace(" ", "_") for kind in FailureKind]),
        ("KV not delivered", [failure.value for failure in PushFailure]),
        ("KV not received", [failure.value for failure in ReceiveFailure]),
        ("Alerts", [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]),
    ],
)
def test_operations_has_a_row_for_every_reason_and_alert(title: str, values: list[str]) -> None:
    assert first_column(title) == values


@pytest.mark.parametrize("page", ["README.md", "docs/routers.md"])
def test_engines_of_a_page_share_no_npu(page: str) -> None:
    prefill, decode = (line for line in lines(REPOSITORY / page) if "vllm serve" in line)
    for line in (prefill, decode):
        size = re.search(r"--tensor-parallel-size (\d+)", line)
        assert len(npus(line)) == (int(size[1]) if size else 1)
    assert not set(npus(prefill)) & set(npus(decode))


def npus(line: str) -> list[str]:
    given = re.search(r"\bASCEND_RT_VISIBLE_DEVICES=(\S+) ", line)
    assert given is not None, line
    return given[1].split(",")
