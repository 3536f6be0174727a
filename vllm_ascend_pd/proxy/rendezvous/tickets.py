# SPDX-License-Identifier: Apache-2.0
"""Reads the part of a ticket that the proxy needs, and rewrites a ticket for another attempt.

All other fields are between the decode engine and the prefill engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, is_name

Sign = Callable[[dict[str, Any], int], dict[str, Any]]
"""Takes a signed ticket and an attempt number; returns the ticket for that attempt, signed anew. Raises ValueError if
the ticket was not signed with the cluster's secret."""


class NotRepeatableError(Exception):
    """The ticket cannot be rewritten for another attempt."""


class TicketHeader(msgspec.Struct, frozen=True):
    """The fields of a ticket that the proxy reads. Raises ValueError for names that cannot be logged."""

    request_id: str
    """The decode engine's name for its request."""
    remote_engine_id: str
    """The decode engine's id."""
    ticket_id: str = ""
    """Empty for tickets of other connectors, whose decode engines cannot tell attempts apart."""
    attempt: int = 0
    """The attempt number."""
    signature: str = ""
    """Empty if tickets are not signed."""
    replaces: str = ""
    """The id of an earlier ticket of the same request, whose transfer has ended. Decode lost the KV again, by a
    preemption for instance. So this ticket is for the prompt and all tokens generated since. Empty for first ones."""

    def __post_init__(self) -> None:
        if not (is_name(self.request_id) and is_name(self.remote_engine_id)):
            raise ValueError("request_id or remote_engine_id is too long or has unprintable characters")


class ParsedTicket(NamedTuple):
    """A ticket as the decode engine posted it, taken apart."""

    header: TicketHeader
    encoded: bytes
    """The ticket as prefill gets it: byte for byte, without the token ids."""
    token_ids: msgspec.Raw | None = None
    """The prompt's token ids as an encoded JSON list: a Python int takes more memory than its digits."""

    def of_attempt(self, number: int, sign: Sign | None) -> ParsedTicket:
        """Returns the ticket for attempt `number`. Raises NotRepeatableError."""
        return self._replace(encoded=of_attempt(self.encoded, self.header, number, sign))


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


def read_ticket(body: bytes) -> ParsedTicket:
    """Reads a posted ticket. Raises msgspec.DecodeError, or another error of `UNREADABLE`, if it is none."""
    header = msgspec.json.decode(body, type=TicketHeader)
    if not header.ticket_id:  # another connector's ticket: its engines use all of it
        return ParsedTicket(header, body)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    token_ids = fields.pop("token_ids", None)
    if token_ids is None or not msgspec.json.decode(token_ids, type=_TokenIds):
        return ParsedTicket(header, body)
    return ParsedTicket(header, msgspec.json.encode(fields), token_ids)


def of_attempt(encoded: bytes, header: TicketHeader, number: int, sign: Sign | None) -> bytes:
    """Returns an encoded ticket for attempt `number`. Raises NotRepeatableError."""
    if not header.ticket_id:
        raise NotRepeatableError("the ticket has no ticket_id")
    if header.signature and sign is None:
        raise NotRepeatableError("the ticket is signed, and the proxy has no ticket secret to sign it again")
    try:
        if header.signature and sign is not None:
            return msgspec.json.encode(sign(msgspec.json.decode(encoded), number))
        fields = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    except (*UNREADABLE, ValueError) as error:  # a field that `TicketHeader` does not read may be malformed
        raise NotRepeatableError(str(error)) from None
    return msgspec.json.encode({**fields, "attempt": msgspec.Raw(str(number).encode())})
