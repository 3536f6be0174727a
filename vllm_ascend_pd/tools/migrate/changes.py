# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd migrate` says: as JSON, which is a `Migration` as it stands here, and as text that can be copied
into a script."""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.tools.vllm_names import KV_ROLES

SCHEMA = 3
"""Grows when a field changes its meaning or goes."""


class ChangeKind(enum.Enum):
    LEFT_OUT = "left out"
    """A setting that is not needed here."""
    CHANGED = "changed"
    """A setting that is added or gets another value."""
    MEANING = "means something else"
    """Stays or is replaced, but works differently from before."""
    CHECK = "check"
    """For the operator: this command cannot see it."""
    STOPS = "stops"
    """The engine would not start or not work."""


class Change(msgspec.Struct, frozen=True):
    """One thing that differs."""

    kind: ChangeKind
    subject: str  # the option, key or variable
    why: str


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's command, before and after."""

    schema: int = SCHEMA
    ok: bool  # whether the engine will start
    role: str  # kv_producer or kv_consumer, empty if unknown
    model: str
    was: tuple[str, ...]  # the connectors of the given command
    kv_transfer_config: dict[str, Any]  # ours; empty if there is none
    command: list[list[str]]  # the new command, one list per option
    environment: dict[str, str]  # what has to change of it, set before the command
    changes: tuple[Change, ...]

    @property
    def stops(self) -> list[Change]:
        return [change for change in self.changes if change.kind is ChangeKind.STOPS]


# As text.

_WIDTH = 120
_SIDES = {role: side for side, role in KV_ROLES.items()}


def render(result: Migration) -> str:
    side = _SIDES.get(result.role, "an engine")
    heading = f"== {side}: {result.model or 'no model named'} ==\n"
    parts = [heading + (_table(result.changes) or "nothing changes\n")]
    if result.kv_transfer_config:
        parts.append("Connector:\n\n" + json.dumps(result.kv_transfer_config, indent=2) + "\n")
        assigned = [f"{name}={shlex.quote(value)}" for name, value in result.environment.items()]
        lines = [*assigned, *(shlex.join(words) for words in result.command)]
        parts.append("Command:\n\n" + " \\\n  ".join(lines) + "\n")
    verdict = "works with these changes" if result.ok else "does not work yet: see what stops it"
    return "\n".join([*parts, f"{verdict}\n"])


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
