# SPDX-License-Identifier: Apache-2.0
"""A class name means one thing in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_ascend_pd"


def test_no_two_classes_have_the_same_name() -> None:
    """Private classes of different modules count, too."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
