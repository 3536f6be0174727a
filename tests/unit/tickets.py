# SPDX-License-Identifier: Apache-2.0
"""Makes a decode rank's ticket and the messages of its writers."""

import msgspec

from vllm_ascend_pd.core.decode_ticket import DecodeTicket
from vllm_ascend_pd.core.protocol import GrantRequest, WriteReport, WriterId
from vllm_ascend_pd.core.topology import sharding

TICKET_ID = "0123456789abcdef" * 2
LEASE_S = 10.0
SETTLE_S = 3.0
DEADLINE = 60.0
DIGEST = "d" * 32
P_TP = sharding(2)

# Two prefill stages of two ranks would be four writers; two suffice: one brings tensors 0 and 2, the other 1 and 2.
LEFT = WriterId("prefill-0", 0, 0)
RIGHT = WriterId("prefill-0", 1, 1)
TWIN = WriterId("prefill-0", 1, 0)  # LEFT's tensor-parallel rank in the other stage
COVERS = {LEFT: (0, 2), RIGHT: (1, 2), TWIN: (2,)}
EXPECTED = frozenset({(0, 0), (2, 0), (1, 1), (2, 1)})
STRANGER = WriterId("prefill-9", 0, 0)


def opened(queue_deadline: float = DEADLINE, transfer_s: float = DEADLINE) -> DecodeTicket:
    ticket = DecodeTicket(TICKET_ID, DIGEST, queue_deadline, transfer_s, LEASE_S)
    ticket.expect("prefill-0", P_TP, EXPECTED)
    assert not ticket.is_owned
    return ticket


def asks(writer: WriterId, covers: tuple[int, ...] | None = None, /, **changes: object) -> GrantRequest:
    request = GrantRequest(TICKET_ID, DIGEST, writer, P_TP, COVERS[writer] if covers is None else covers, SETTLE_S)
    return msgspec.structs.replace(request, **changes)


def wrote(writer: WriterId, num_bytes: int = 0, bytes_before_end: int = 0) -> WriteReport:
    return WriteReport(TICKET_ID, writer, None, num_bytes, bytes_before_end)


def failed(writer: WriterId, reason: str = "it broke", settle_s: float = 0.0) -> WriteReport:
    return WriteReport(TICKET_ID, writer, reason, settle_s=settle_s)
