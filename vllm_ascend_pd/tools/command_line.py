# SPDX-License-Identifier: Apache-2.0
"""What the commands of this package have in common: the option `--version`, and how they tell of a wrong option."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Annotated, Any, NoReturn, cast

import msgspec
import typer
from typer.core import TyperCommand

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


def as_json(result: msgspec.Struct) -> str:
    """Returns what `--json` prints."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def new_app(*, add_completion: bool = False, **settings: Any) -> typer.Typer:
    """Returns an app with plain help, because rich cuts the names of options at 80 columns."""
    return typer.Typer(add_completion=add_completion, pretty_exceptions_enable=False, rich_markup_mode=None, **settings)


_ADDED = re.compile(r"\s*\[([^\[\]]*)\]$")
"""What typer adds to an option's text: `[default: 8000; x>=1]`."""
_RANGE = re.compile(r"\S*<?=?x[<>]\S*")


class ShortHelp(TyperCommand):
    """A command whose help has one line for each option, if its text is short enough."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options, with defaults": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                rows = sections["Arguments" if param.param_type_name == "argument" else "Options, with defaults"]
                rows.append((record[0], _ADDED.sub(_default, record[1])))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=34)


def _default(added: re.Match[str]) -> str:
    """Returns the default alone: what a number may be is said when it is wrong."""
    parts = [part.removeprefix("default: ") for part in added[1].split("; ") if not _RANGE.fullmatch(part)]
    return f" [{'; '.join(parts).strip('()').removesuffix('.0')}]" if parts else ""


def removed_option(words: Iterable[str], removed: Mapping[str, str]) -> str | None:
    """Returns what replaces an option of an earlier version, None if there is none before `--`.

    removed: the options, each with what holds instead.
    """
    for word in takewhile(lambda word: word != "--", words):
        if (name := word.partition("=")[0]) in removed:
            return f"there is no option {name} any more: {removed[name]}"
    return None


def run_app(app: typer.Typer, name: str) -> NoReturn:
    """Exits with 2 and one line for a wrong option."""
    try:
        sys.exit(app(prog_name=name, standalone_mode=False))
    except typer.Abort:
        sys.exit(130)
    except USAGE_ERROR as error:
        line = " ".join(_as_typed(error).format_message().split())
        of = f"{name} {error.ctx.info_name}" if error.ctx and error.ctx.parent else name
        print(f"{name.removesuffix('.sh')}: {line.rstrip('.')}; see {of} --help", file=sys.stderr)
        sys.exit(2)


def _as_typed(error: Any) -> Any:
    """Names an unknown option as the user wrote it, and only options that look like it."""
    if option := getattr(error, "option_name", None):
        if not option.startswith("--"):  # a word such as `-tp` is read as short options, one for each letter
            option = next((word for word in sys.argv[1:] if word.startswith(option)), option)
        error.message = f"No such option: {option}"
        known = (name for each in error.ctx.command.params for name in each.opts)
        error.possibilities = difflib.get_close_matches(option, known, n=3, cutoff=0.75)
    return error
