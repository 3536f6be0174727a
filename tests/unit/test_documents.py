# SPDX-License-Identifier: Apache-2.0
"""The documents: links, anchors and paths lead somewhere, what is generated is up to date, and the pages name all that
there is."""

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

from page_tables import PAGES as PAGES_WITH_TABLES
from page_tables import filled

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


def test_links_and_paths_lead_somewhere() -> None:
    """Links with their anchors, and paths of files, those of modules below `vllm_ascend_pd/` among them."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    broken = {}
    for page in ALL_PAGES:
        modules = [path for path in MODULE.findall(prose(page)) if path.partition("/")[0] in rooms]
        paths = [*(REPOSITORY / path for path in PATH.findall(prose(page))), *(PACKAGE / path for path in modules)]
        broken[page.name] = [*broken_links(page), *(str(path) for path in paths if not path.exists())]
    assert {name: found for name, found in broken.items() if found} == {}


def test_the_chinese_readme_has_the_same_commands_and_figures() -> None:
    english = REPOSITORY / "README.md"
    assert lines(CHINESE) == lines(english)
    assert re.findall(r"\d+%?", prose(CHINESE)) == re.findall(r"\d+%?", prose(english))


def test_the_chinese_readme_has_full_width_punctuation() -> None:
    chinese = "[\u4e00-\u9fff]"
    text = re.sub(r"\]\([^)]*\)", "]", prose(CHINESE))
    assert re.findall(rf".*{chinese}[,;:.()].*|.*[,;:()]{chinese}.*", text) == []


# --- what is generated --------------------------------------------------------------------------------------


def test_the_configurations_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(REPOSITORY / "scripts" / "config_reference.py"))
    assert made["PAGE"].read_text() == made["page"](), "run scripts/config_reference.py"


@pytest.mark.parametrize("page", PAGES_WITH_TABLES, ids=lambda page: page.name)
def test_the_page_has_what_the_files_have(page: Path) -> None:
    assert page.read_text() == filled(page), "run python scripts/page_tables.py"


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
