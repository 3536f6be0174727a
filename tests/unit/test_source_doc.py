# SPDX-License-Identifier: Apache-2.0
"""`docs/source.md` names every module there is, and no other; the README names every folder and top-level module."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "vllm_ascend_pd"
_ROW = re.compile(r"^\| `([\w.]+\.py)` \| \S.* \|$", re.MULTILINE)


def test_every_module_is_in_its_folders_table() -> None:
    named = []
    for section in (REPOSITORY / "docs" / "source.md").read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        folder = "" if title == "Top level" else title.strip("`")
        named += [f"{folder}{file}" for file in _ROW.findall(text)]
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    modules -= {name for name in modules if name.endswith("/__init__.py")}
    assert sorted(named) == sorted(modules)


def test_the_readme_names_folders_and_top_level_modules() -> None:
    _, _, story = (REPOSITORY / "README.md").read_text().partition("\n## How it is built\n")
    names = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    names |= {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert {name for name in names if f"`{name}" not in story} == set()
