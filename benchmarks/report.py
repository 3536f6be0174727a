# SPDX-License-Identifier: Apache-2.0
"""How benchmarks print a result that has a bar."""

import json
from dataclasses import asdict
from typing import Any


def line(result: Any, holds: bool, as_json: bool, **more: object) -> str:
    """A dataclass with a `row()`: as an object with `more`, or as a table's row that says if its bar is missed."""
    if as_json:
        return json.dumps({**asdict(result), **more, "holds": holds})
    return str(result.row()) + ("" if holds else "   <- misses its bar")
