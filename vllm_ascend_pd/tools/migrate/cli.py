# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd migrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version


def migrate(
    start: Annotated[
        list[str],
        typer.Argument(
            help="What starts an engine: a launch script with its arguments in quotes, or the `vllm serve` command. "
            "- reads it from standard input. Give both sides to check that they fit."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Folder with the model's config.json, if it is not where the command says."),
    ] = None,
    proxy: Annotated[str | None, typer.Option(help="URL at which decode engines reach the proxy.")] = None,
    values: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of a variable that a script leaves open. Repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    version: Version = False,
) -> None:
    """Turn the commands of engines with vllm-ascend's Mooncake connectors into ones for this connector.

    Starts nothing and changes no file. The exit code is 0 only if the new commands will start.
    """
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.tools.migrate.command import migrate_commands, read_input, result_text, with_values
    from vllm_ascend_pd.tools.migrate.script import MigrateError

    if len(start) > 2:
        raise USAGE_ERROR(f"{len(start)} engines given: at most one prefill and one decode engine")
    pairs = [text.partition("=") for text in values or ()]
    if wrong := next((name for name, equals, _ in pairs if not equals or not name), None):
        raise USAGE_ERROR(f"--set {wrong}: not NAME=VALUE")
    try:
        commands = [with_values(read_input(text), {name: value for name, _, value in pairs}) for text in start]
        result = migrate_commands(commands, model, proxy)
    except (MigrateError, OSError, UnicodeDecodeError) as error:
        raise USAGE_ERROR(str(error)) from None
    print(result_text(result, json), end="")
    if not result.ok:
        raise typer.Exit(1)
