# SPDX-License-Identifier: Apache-2.0
"""A class name means one thing in the whole package, and its tools start without vLLM and torch."""

import ast
import subprocess
import sys
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


def test_tools_need_neither_vllm_nor_torch() -> None:
    """The doctor and `migrate` run on hosts without them, and where torch cannot be loaded."""
    doctor = ["hardware", "loading", "loopback", "npus", "pair", "ports", "versions"]
    names = ["cli", *(f"tools.doctor.{name}" for name in doctor), "tools.migrate.engine", "tools.plan.tables"]
    program = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
        f"[__import__('vllm_ascend_pd.' + name) for name in {names}]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
