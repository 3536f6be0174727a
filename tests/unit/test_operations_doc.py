# SPDX-License-Identifier: Apache-2.0
"""`docs/operations.md` knows every reason and message there is, and no other reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from vllm_ascend_pd.core.failure import PushFailure, ReceiveFailure
from vllm_ascend_pd.proxy.routing.answers import FailureKind

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
PROXY = REPOSITORY / "vllm_ascend_pd" / "proxy"
ALERTS = yaml.safe_load((REPOSITORY / "examples" / "observability" / "alerts.yml").read_text())
# Whoever makes an answer, or the reason in one.
ANSWERS = {
    "RequestRefused",
    "PostRefused",
    "TooManyEnginesError",
    "NoFreeSlotError",
    "_full",
    "_bad_request",
    "error_response",
    "error_answer",
    "bad_gateway",
    "EngineError",
    "failed",
}


def first_column(title: str) -> list[str]:
    [section] = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
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
def test_every_reason_has_a_row(title: str, values: list[str]) -> None:
    assert first_column(title) == values


def literal_parts(node: ast.expr) -> list[str]:
    """Of a string or f-string, what is the same each time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return []


def messages(source: str) -> Iterator[list[str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ANSWERS:
            yield from (literal_parts(argument) for argument in node.args)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
            yield literal_parts(node.value)


def test_every_message_of_the_proxy_is_there() -> None:
    found = [
        " ".join(part.split())
        for file in sorted(PROXY.rglob("*.py"))
        for parts in messages(file.read_text())
        for part in parts
        if len(part.split()) >= 3
    ]
    assert len(found) > 25
    missing = [part for part in found if part.strip(" :") not in PAGE]
    assert not missing
