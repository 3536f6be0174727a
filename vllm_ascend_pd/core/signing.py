# SPDX-License-Identifier: Apache-2.0
"""Signs tickets with the cluster's secret, and verifies them.

Decode signs the tickets that it issues. Prefill serves only signed ones. The signature covers the ticket's fields,
except those that prefill does not know and those that have their default value.
"""

import msgspec

from vllm_ascend_pd.core.secret import Secret, Use
from vllm_ascend_pd.core.ticket import Ticket, TicketError

CLOCK_SKEW_S = 30
"""Seconds that the clocks of decode and prefill hosts may differ by."""

# `token_ids` are used only after a comparison with `prompt`, which is signed. `replaces` is for the metaserver alone.
# Add a new field here, too, while prefill engines may run that do not know it: they would refuse its signature.
_NOT_SIGNED = ("signature", "token_ids", "replaces")
_encoder = msgspec.msgpack.Encoder(order="sorted")


def signed(ticket: Ticket, secret: Secret, expires_at: int) -> Ticket:
    """Returns `ticket`, signed and valid until `expires_at` (unix seconds)."""
    ticket = msgspec.structs.replace(ticket, expires_at=expires_at)
    return msgspec.structs.replace(ticket, signature=secret.sign(Use.TICKET, _content(ticket)))


def verify(ticket: Ticket, secret: Secret) -> None:
    """Raises TicketError unless `ticket` has the right signature. Does not look at `expires_at`."""
    if not ticket.signature:
        raise TicketError("the ticket is not signed: decode needs this cluster's secret (secret_file)")
    if not secret.accepts(Use.TICKET, _content(ticket), ticket.signature):
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
