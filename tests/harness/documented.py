# SPDX-License-Identifier: Apache-2.0
"""The commands that README.md, docs/*.md and examples/*/README.md tell a reader to run: each line of a fence marked
`sh`. A test that runs one takes it from its page with `documented`, so it runs what the reader runs."""

import ast
import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("examples/*/README.md")]
)


def fences(page: Path) -> list[tuple[str, str]]:
    """Returns (language, body) of each fence, also of those in lists."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(body)) for language, body in found]


@cache
def lines(page: Path) -> list[str]:
    """Returns the commands of a page in their order, without comments. A command over several lines is one."""
    bodies = (body.replace("\\\n", " ") for language, body in fences(page) if language == "sh")
    return [re.sub(r"\s+# .*", "", line) for body in bodies for line in body.splitlines() if line]


def documented(page: str, beginning: str, replaced: Mapping[str, str] | None = None) -> list[str]:
    """Returns the words of the command in `page` that begins with `beginning`. `replaced`: parts that a reader would
    replace.
    """
    return shlex.split(filled(the_line(page, beginning), replaced or {}))


def filled(line: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        assert old in line, f"{line!r} has no {old!r} to replace"
        line = line.replace(old, new)
    return line


def the_line(page: str, beginning: str) -> str:
    known = lines(REPOSITORY / page)
    found = {line for line in known if line == beginning} or {line for line in known if line.startswith(beginning)}
    assert len(found) == 1, f"{page} has {len(found)} commands that begin with {beginning!r}"
    return found.pop()


def taken_by(test: str) -> set[str]:
    """Returns the commands that a test's file takes from their pages. `test`: `tests/e2e/test_x.py::test_y`, which must
    exist.
    """
    path, _, name = test.partition("::")
    tree = ast.parse((REPOSITORY / path).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), f"there is no {test}"
    return {the_line(*where) for where in _taken(tree)}


def _taken(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "documented":
            page, beginning = (ast.literal_eval(argument) for argument in node.args[:2])
            yield page, beginning


def is_part_of(words: Sequence[str], command: Sequence[str]) -> bool:
    """Whether a running command has all options of a documented one, with its values; of a JSON object, its keys."""
    return all(_has(running, value) for running, value in _pairs(words, command))


def _pairs(words: Sequence[str], command: Sequence[str]) -> Iterator[tuple[str | None, str]]:
    for option, value in itertools.pairwise(words):
        if option.startswith("--"):
            yield (command[command.index(option) + 1] if option in command else None), value


def _has(running: str | None, value: str) -> bool:
    if running is not None and value.startswith("{"):
        return json.loads(value).items() <= json.loads(running).items()
    return running == value
