# SPDX-License-Identifier: Apache-2.0
"""Reads the part of a ticket that the proxy needs.

All other fields are between the decode engine and the prefill engine.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from vllm_ascend_pd.core.text import is_name


class _Prompt(msgspec.Struct, frozen=True):
    adapter: str = ""


class TicketHeader(msgspec.Struct, frozen=True):
    """The fields of a ticket that the proxy reads. Raises ValueError for names that cannot be logged."""

    request_id: str
    """The decode engine's name for its request."""
    remote_engine_id: str
    """The decode engine's id."""
    ticket_id: str = ""
    """Empty for tickets of other connectors."""
    prompt: _Prompt | None = None
    """What decides the prompt's KV. None if the ticket does not tell it."""
    replaces: str = ""
    """The id of an earlier ticket of the same request, whose transfer has ended. Decode lost the KV again, by a
    preemption for instance. So this ticket is for the prompt and all tokens generated since. Empty for first ones."""

    @property
    def is_for_base_model(self) -> bool:
        """Whether the request uses no adapter, by whatever name the client called the model."""
        return self.prompt is not None and not self.prompt.adapter

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
