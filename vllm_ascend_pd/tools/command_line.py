# SPDX-License-Identifier: Apache-2.0
"""How each command of this package tells of a wrong option: one line, and exit code 2."""

from __future__ import annotations

import sys
from typing import NoReturn, cast

import typer

# typer exports one usage error; the base of all of them is click's or, in newer versions, typer's own copy.
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


def run_app(app: typer.Typer, name: str) -> NoReturn:
    """Exits with 2 and one line for a wrong option."""
    try:
        code = app(prog_name=name, standalone_mode=False)
    except typer.Abort:
        code = 130
    except USAGE_ERROR as error:
        print(f"{name.removesuffix('.sh')}: {error.format_message()}", file=sys.stderr)
        code = 2
    sys.exit(code)
