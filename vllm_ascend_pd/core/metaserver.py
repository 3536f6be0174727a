# SPDX-License-Identifier: Apache-2.0
"""What decode tells the metaserver besides tickets (HTTP, JSON)."""

from typing import Annotated

import msgspec

FAILURE_SUFFIX = "/failure"
"""Behind the URL that tickets are posted to: there goes a `TransferFailure`. Others than our proxy need not know it."""

WAITING_SUFFIX = "/waiting"
"""Behind the URL that tickets are posted to: there goes a `WaitingQuestion`. Others than our proxy need not know it."""

MAX_ASKED = 1024
"""Tickets in one `WaitingQuestion`."""

RECOMPUTES_HEADER = "X-KV-Recomputes"
"""With a ticket, `1`: decode computes a prompt itself whose KV does not come (`kv_load_failure_policy`)."""

MAX_REASON_CHARS = 500


class TransferFailure(msgspec.Struct, frozen=True):
    """Decode noticed that `attempt` of a ticket failed, and why. `final`: it waits for no further attempt."""

    request_id: str
    ticket_id: str
    attempt: int
    reason: str
    final: bool


TicketIds = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=MAX_ASKED)]


class WaitingQuestion(msgspec.Struct, frozen=True):
    """Decode asks which of these tickets still wait for a prefill engine, or are served by one that is well."""

    ticket_ids: TicketIds


class WaitingAnswer(msgspec.Struct, frozen=True):
    """Those that do."""

    waiting: TicketIds
