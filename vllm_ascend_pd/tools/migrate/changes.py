# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ascend-pd migrate` says about one engine or a pair. `--json` prints a `Migration` as it stands here."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import msgspec

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
    environment: dict[str, str]  # set before the command: what has to change, and what a pasted command sets itself
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
