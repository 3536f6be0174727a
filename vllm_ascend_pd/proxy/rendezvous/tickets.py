# SPDX-License-Identifier: Apache-2.0
"""The part of a ticket that the proxy reads, and what it changes for another attempt. The rest is between D and P."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, is_name

Sign = Callable[[dict[str, Any], int], dict[str, Any]]
"""Of a signed ticket and an attempt's number: the ticket as that attempt, signed anew. Raises ValueError for one that
was not signed with the cluster's secret."""


class NotRepeatableError(Exception):
    """A ticket that only one attempt can be made with."""


class TicketHeader(msgspec.Struct, frozen=True):
    request_id: str
    remote_engine_id: str
    ticket_id: str = ""
    """Empty: of another connector, whose decode engines cannot tell attempts apart."""
    attempt: int = 0
    signature: str = ""

    def __post_init__(self) -> None:
        if not (is_name(self.request_id) and is_name(self.remote_engine_id)):
            raise ValueError("request_id or remote_engine_id is too long or has unprintable characters")


class ParsedTicket(NamedTuple):
    """A ticket as decode posted it, taken apart."""

    ticket: TicketHeader
    encoded: bytes
    """What prefill gets: byte for byte, without the token ids."""
    token_ids: msgspec.Raw | None = None
    """The prompt's, as a JSON list: they stay encoded, since an int takes more memory than its digits."""

    def of_attempt(self, number: int, sign: Sign | None) -> ParsedTicket:
        """Raises NotRepeatableError."""
        return self._replace(encoded=of_attempt(self.encoded, self.ticket, number, sign))


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


def read_ticket(body: bytes) -> ParsedTicket:
    """Raises msgspec.DecodeError and the other `UNREADABLE` for what is no ticket."""
    ticket = msgspec.json.decode(body, type=TicketHeader)
    if not ticket.ticket_id:  # another connector's: all of it is between its engines
        return ParsedTicket(ticket, body)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    token_ids = fields.pop("token_ids", None)
    if token_ids is None or not msgspec.json.decode(token_ids, type=_TokenIds):
        return ParsedTicket(ticket, body)
    return ParsedTicket(ticket, msgspec.json.encode(fields), token_ids)


def of_attempt(encoded: bytes, ticket: TicketHeader, number: int, sign: Sign | None) -> bytes:
    """The same ticket for attempt `number`. Raises NotRepeatableError."""
    if not ticket.ticket_id:
        raise NotRepeatableError("the ticket has no ticket_id")
    if ticket.signature and sign is None:
        raise NotRepeatableError("the ticket is signed, and the proxy has no ticket secret to sign it again")
    try:
        if ticket.signature and sign is not None:
            return msgspec.json.encode(sign(msgspec.json.decode(encoded), number))
        fields = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    except (*UNREADABLE, ValueError) as error:  # also in what `TicketHeader` does not read
        raise NotRepeatableError(str(error)) from None
    return msgspec.json.encode({**fields, "attempt": msgspec.Raw(str(number).encode())})
