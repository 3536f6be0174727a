# SPDX-License-Identifier: Apache-2.0
"""`docs/operations.md` has a row for every reason and alert, and for no other."""

import re
from pathlib import Path

import pytest
import yaml

from vllm_ascend_pd.core.reasons import PushFailure, ReceiveFailure
from vllm_ascend_pd.proxy.routing.answers import FailureKind

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
ALERTS = yaml.safe_load((REPOSITORY / "examples" / "observability" / "alerts.yml").read_text())


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
