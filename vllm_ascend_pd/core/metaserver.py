# SPDX-License-Identifier: Apache-2.0
"""Messages from decode to the metaserver besides tickets (HTTP, JSON)."""

from typing import Annotated

import msgspec

FAILURE_SUFFIX = "/failure"
"""Appended to the URL for tickets: takes a `TransferFailure`. Metaservers other than our proxy need not have it."""

WAITING_SUFFIX = "/waiting"
"""Appended to the URL for tickets: takes a `WaitingQuestion`. Metaservers other than our proxy need not have it."""

MAX_ASKED = 1024
"""Most tickets in one `WaitingQuestion`."""

RECOMPUTES_HEADER = "X-KV-Recomputes"
"""Header of a ticket. `1`: decode computes a prompt itself if its KV does not arrive (`kv_load_failure_policy`)."""

MAX_REASON_CHARS = 500


class TransferFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt at a ticket failed, or a request gets no ticket and ends."""

    request_id: str
    # "": the request gets no ticket, or no further one.
    ticket_id: str
    attempt: int
    # Why it failed.
    reason: str
    # Whether decode waits for no further attempt.
    final: bool
    # Whether other decode engines would refuse the request, too.
    is_unfit: bool = False


TicketIds = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=MAX_ASKED)]


class WaitingQuestion(msgspec.Struct, frozen=True):
    """Asks which of these tickets still wait for a prefill engine, or are served by a healthy one."""

    ticket_ids: TicketIds


class WaitingAnswer(msgspec.Struct, frozen=True):
    """Answers a `WaitingQuestion` with those tickets."""

    waiting: TicketIds
