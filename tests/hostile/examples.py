# SPDX-License-Identifier: Apache-2.0
"""Messages as engines send them."""

import msgspec

from harness.tickets import ticket_with
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Order, RankCaches, TokenShare
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    AskTicket,
    Describe,
    EngineDescription,
    Granted,
    GrantRefused,
    GrantRequest,
    OfferTicket,
    Problem,
    RankDescription,
    ReleasePrompt,
    Revoke,
    TicketRefused,
    TicketTaken,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.topology import sharding

WRITER = WriterId("prefill-0", 0, 1)
GEOMETRY = Geometry(0, Order.TOKEN_MAJOR, "bfloat16", 16, 32768, 4, 8, 256)
CACHES = RankCaches(
    (GEOMETRY, msgspec.structs.replace(GEOMETRY, share=TokenShare(2, 1, 8))),
    (CacheTensor("model.layers.0", 0, 1 << 40, 64, 0), CacheTensor("model.layers.0", 1, 1 << 41, 64, 1)),
)
RANK = RankDescription(0, 1, "tcp://127.0.0.1:5555", "127.0.0.1:5556", CACHES)
TICKET = ticket_with(request_id="cmpl-0")
MESSAGES = (
    Describe("decode-0"),
    EngineDescription("decode-0", "a model", 2, 1, (RANK, RANK), 2, 8, {"rope_theta": "10000"}),
    GrantRequest("0" * 32, "f" * 32, WRITER, sharding(4, 2, 16), (0, 1, 2), 5.0, weights="0123456789abcdef"),
    Granted(20.0),
    GrantRefused("not yet", retry=True),
    WriteReport("0" * 32, WRITER, None, 1000, 10, 1.5, "f" * 32),
    WriteReport("0" * 32, WRITER, "it failed"),
    Acknowledged(),
    Revoke("0" * 32, WRITER, "the client left", "f" * 32),
    OfferTicket("prefill-0", "xfer-0", TICKET),
    AskTicket("prefill-0", "xfer-0", "0" * 32),
    TicketTaken(),
    TicketRefused("too many tickets wait", retry=True),
    ReleasePrompt("prefill-0", "xfer-0", "decode computes the prompt", "f" * 32, 40, TICKET.prompt),
    Problem("unreadable"),
)
PLAIN = tuple(msgspec.to_builtins(message) for message in MESSAGES)
LARGE = EngineDescription("decode-0", "a model", 2, 1, (RANK,) * 500)
