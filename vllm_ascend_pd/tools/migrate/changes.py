# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd migrate` says about one engine or a pair: as JSON, which is a `Migration` as it stands here, and
as text that can be copied into a script."""

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

from vllm_ascend_pd.tools.vllm_serve import KV_ROLES

SCHEMA = 2
"""Grows when a field changes its meaning or goes."""


class MigrateError(ValueError):
    """The input cannot be understood."""


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
    """The engine or the pair would not start or not work."""


class Change(msgspec.Struct, frozen=True):
    """One thing that differs."""

    kind: ChangeKind
    subject: str  # the option, key or variable
    why: str


class EngineMigration(msgspec.Struct, frozen=True):
    """One engine's command, before and after."""

    role: str  # kv_producer or kv_consumer, empty if unknown
    model: str
    was: tuple[str, ...]  # the connectors of the given command
    kv_transfer_config: dict[str, Any]  # ours; empty if there is none
    command: list[list[str]]  # the new command, one list per option
    environment: dict[str, str]  # what has to change of it, set before the command
    url: str  # where the engine serves, for the proxy
    changes: tuple[Change, ...]

    @property
    def stops(self) -> list[Change]:
        return stopping(self.changes)


class Migration(msgspec.Struct, frozen=True):
    """The result of the command."""

    schema: int
    ok: bool  # whether everything will start
    engines: tuple[EngineMigration, ...]
    pair: tuple[Change, ...]  # what does not fit between prefill and decode
    proxy: list[str]  # the proxy's command


def stopping(changes: Iterable[Change]) -> list[Change]:
    return [change for change in changes if change.kind is ChangeKind.STOPS]


# As text.

_WIDTH = 120
_SIDES = {role: side for side, role in KV_ROLES.items()}


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
