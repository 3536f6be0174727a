# SPDX-License-Identifier: Apache-2.0
"""What the commands of this package have in common: the option `--version`, and how they tell of a wrong option."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn, cast

import typer

from vllm_ascend_pd import __version__

# typer exports one usage error; the base of all of them is click's or, in newer versions, typer's own copy.
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"vllm-ascend-pd {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
]
"""The type of a parameter of every command. Its value is always False: otherwise the command does not run."""


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
