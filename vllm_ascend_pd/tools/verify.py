# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd verify`: says what is wrong with KV that `verify_kv` has dumped (docs/garbled.md)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import Version


def verify(
    dump: Annotated[Path, typer.Argument(help="A file that `verify_kv` wrote into decode's `trace_dir`.")],
    version: Version = False,
) -> None:
    """Say what pattern wrong KV has, and what that usually means."""
    # Imported here so that other commands start faster.
    from zipfile import BadZipFile

    from vllm_ascend_pd.core.kv_dump import pattern, read_dump
    from vllm_ascend_pd.core.text import one_line

    try:
        of = read_dump(dump)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        print(f"vllm-ascend-pd: {dump} is no dump of KV: {one_line(str(error), 500)}", file=sys.stderr)
        raise typer.Exit(1) from None
    what, meaning = pattern(of)
    print(f"{of.text}\nfound: {what}\nusually: {meaning}")
