# SPDX-License-Identifier: Apache-2.0
"""Links, anchors and paths in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

from harness.documented import PAGES, REPOSITORY, lines

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
