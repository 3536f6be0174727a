# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd migrate`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version, as_json

_AT_THE_START = (
    "engines that do not fit refuse each other with the reason; `doctor --prefill URL --decode URL` says more"
)
REMOVED = {
    "--pair": _AT_THE_START,
    "--save": _AT_THE_START,
    "--proxy": "the proxy signs its URL with the cluster's secret, so decode's command does not name it",
}
"""Options of earlier versions, each with what holds instead."""


def migrate(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="-- and the `vllm serve` command of an engine.", show_default=False),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Folder with the model's config.json, if it is not where the command says."),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--exec", help="Start the new command, if nothing stops it. Prints to standard error.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    version: Version = False,
) -> None:
    """Turn the command of an engine with vllm-ascend's Mooncake connectors into one for this connector.

    Put `vllm-ascend-pd migrate --` in front of `vllm serve` in a launch script and run the script. The exit code is 1
    if something is known to keep the new command from starting.
    """
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.tools.migrate.changes import render
    from vllm_ascend_pd.tools.migrate.command import CommandError, read_arguments
    from vllm_ascend_pd.tools.migrate.engine import migrate_command

    try:
        result = migrate_command(read_arguments(command, os.environ), model)
    except (CommandError, OSError, UnicodeDecodeError) as error:
        raise USAGE_ERROR(str(error)) from None
    print(as_json(result) if json else render(result), end="", file=sys.stderr if execute else sys.stdout)
    if not result.ok:
        raise typer.Exit(1)
    if execute:
        _start([word for part in result.command for word in part], {**os.environ, **result.environment})


def _start(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes the engine's process."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the engine would inherit that
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        print(f"vllm-ascend-pd: {words[0]}: {error}", file=sys.stderr)
        raise typer.Exit(127) from None
