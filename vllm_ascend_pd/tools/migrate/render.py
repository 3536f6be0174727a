# SPDX-License-Identifier: Apache-2.0
"""Prints a migration as text that can be copied into a script."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.tools.migrate.changes import Change, ChangeKind, EngineMigration, Migration

_WIDTH = 120
_SIDES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def render(result: Migration) -> str:
    parts = [_engine(engine) for engine in result.engines]
    if len(result.engines) > 1:
        parts.append(_heading("prefill and decode") + (_table(result.pair) or "they fit\n"))
    if any(engine.kv_transfer_config for engine in result.engines):
        parts.append(_heading("proxy") + shlex.join(result.proxy) + "\n")
    verdict = "works with these changes" if result.ok else "does not work yet: see what stops it"
    return "\n".join([*parts, f"{verdict}\n"])


def _engine(engine: EngineMigration) -> str:
    side = _SIDES.get(engine.role, "an engine")
    text = _heading(f"{side}: {engine.model or 'no model named'}") + (_table(engine.changes) or "nothing changes\n")
    if not engine.kv_transfer_config:
        return text
    text += "\nConnector:\n\n" + json.dumps(engine.kv_transfer_config, indent=2) + "\n"
    assigned = [f"{name}={shlex.quote(value)}" for name, value in engine.environment.items()]
    lines = [*assigned, *(shlex.join(words) for words in engine.command)]
    return text + "\nCommand:\n\n" + " \\\n  ".join(lines) + "\n"


def _heading(text: str) -> str:
    return f"== {text} ==\n"


def _table(changes: Iterable[Change]) -> str:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=34)
    table.add_column(overflow="fold")
    for change in sorted(changes, key=lambda change: list(ChangeKind).index(change.kind), reverse=True):
        table.add_row(Text(change.kind.value), Text(change.subject), Text(change.why))
    console = Console(width=_WIDTH, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines() if line.strip())
