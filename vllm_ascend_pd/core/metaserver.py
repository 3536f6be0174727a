# SPDX-License-Identifier: Apache-2.0
"""What decode tells the metaserver besides tickets (HTTP, JSON)."""

import msgspec

FAILURE_SUFFIX = "/failure"
"""Behind the URL that tickets are posted to: there goes a `TransferFailure`. Others than our proxy need not know it."""

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
