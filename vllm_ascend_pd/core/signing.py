# SPDX-License-Identifier: Apache-2.0
"""Signs tickets with the cluster's secret, and verifies them.

Decode signs the tickets that it issues. Prefill serves only signed ones. The signature is an HMAC-SHA256 over the
ticket's fields. Fields that prefill does not know, and fields with their default value, do not count.
"""

import hashlib
import hmac
from typing import Any

import msgspec

from vllm_ascend_pd.core.ticket import Ticket, TicketError

MIN_SECRET_BYTES = 32
CLOCK_SKEW_S = 30
"""Seconds that the clocks of decode and prefill hosts may differ by."""

_PURPOSE = b"vllm-ascend-pd ticket 1\0"
# `token_ids` are used only after a comparison with `prompt`, which is signed. `replaces` is for the metaserver alone.
_NOT_SIGNED = ("signature", "token_ids", "replaces")
_encoder = msgspec.msgpack.Encoder(order="sorted")


class Secret:
    """The cluster's ticket secret. Neither `repr` nor pickling shows it."""

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        """Raises ValueError for a secret that is too short."""
        if len(content) < MIN_SECRET_BYTES:
            raise ValueError(f"{len(content)} bytes are too short for a secret: {MIN_SECRET_BYTES} at least")
        self._content = content

    def signature(self, content: bytes) -> str:
        """Returns the signature of `content` in hexadecimal digits."""
        return hmac.new(self._content, _PURPOSE + content, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        raise TypeError("a secret cannot be pickled")


def signed(ticket: Ticket, secret: Secret, expires_at: int) -> Ticket:
    """Returns `ticket`, signed and valid until `expires_at` (unix seconds)."""
    ticket = msgspec.structs.replace(ticket, expires_at=expires_at)
    return msgspec.structs.replace(ticket, signature=secret.signature(_content(ticket)))


def verify(ticket: Ticket, secret: Secret) -> None:
    """Raises TicketError unless `ticket` has the right signature. Does not look at `expires_at`."""
    if not ticket.signature:
        raise TicketError("the ticket is not signed: decode needs this cluster's ticket_secret_file")
    if not hmac.compare_digest(ticket.signature.encode(), secret.signature(_content(ticket)).encode()):
        raise TicketError("the ticket was altered, or signed with another secret")


def _content(ticket: Ticket) -> bytes:
    """Returns what is signed."""
    said = {}
    for field in msgspec.structs.fields(ticket):
        value = getattr(ticket, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.name not in _NOT_SIGNED and value != default:
            said[field.name] = value
    return _encoder.encode(said)
