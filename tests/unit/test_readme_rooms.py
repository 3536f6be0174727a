# SPDX-License-Identifier: Apache-2.0
"""The README names every folder and top-level module of the package."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "vllm_ascend_pd"


def test_the_readme_names_folders_and_top_level_modules() -> None:
    _, _, story = (REPOSITORY / "README.md").read_text().partition("\n## How it is built\n")
    names = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    names |= {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert {name for name in names if f"`{name}`" not in story} == set()
