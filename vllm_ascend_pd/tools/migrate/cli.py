# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd migrate`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version, as_json
from vllm_ascend_pd.tools.vllm_serve import ServeOptions, UnknownOptionsError, installed, table


def migrate(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="-- and the `vllm serve` command of an engine.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder with the model's config.json, if it is not where the command says."),
    ] = None,
    proxy: Annotated[str | None, typer.Option(help="URL at which decode engines reach the proxy.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the result to this file, for --pair.")] = None,
    pair: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="FILE FILE", help="Results of --save: check that these prefill and decode engines fit."),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--exec", help="Start the new command, if nothing stops it. Prints to standard error.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    version: Version = False,
) -> None:
    """Turn the command of an engine with vllm-ascend's Mooncake connectors into one for this connector.

    Put `vllm-ascend-pd migrate --` in front of `vllm serve` in a launch script and run the script. The exit code is 0
    only if the new command will start.
    """
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.tools.migrate import command as commands
    from vllm_ascend_pd.tools.migrate.arguments import read_arguments
    from vllm_ascend_pd.tools.migrate.changes import MigrateError, render

    if (pair is None) is (not command):
        raise USAGE_ERROR("give the `vllm serve` command of one engine after --, or --pair and two files of --save")
    if pair is not None and (execute or save is not None):
        raise USAGE_ERROR("--exec and --save are for one engine, not for --pair")
    try:
        if pair is not None:
            result = commands.migrate_pair([commands.read_result(file) for file in pair], model, proxy)
        else:
            arguments = read_arguments(command or [], _options(), os.environ)
            result = commands.migrate_command(arguments, model, proxy)
        if save is not None:
            save.write_text(as_json(result), encoding="utf-8")
    except (MigrateError, OSError, UnicodeDecodeError) as error:
        raise USAGE_ERROR(str(error)) from None
    print(as_json(result) if json else render(result), end="", file=sys.stderr if execute else sys.stdout)
    if not result.ok:
        raise typer.Exit(1)
    if execute:
        try:
            commands.start(result.engines[0], os.environ)
        except OSError as error:
            print(f"vllm-ascend-pd: {result.engines[0].command[0][0]}: {error}", file=sys.stderr)
            raise typer.Exit(127) from None


def _options() -> ServeOptions:
    """Returns the options of the installed vLLM, or those of a table of ours."""
    try:
        return installed() or table()
    except UnknownOptionsError as error:
        print(f"vllm-ascend-pd: uses the options of vLLM 0.23 to 0.32, since this vLLM fails: {error}", file=sys.stderr)
        return table()
