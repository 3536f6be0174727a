# SPDX-License-Identifier: Apache-2.0
"""A decode engine's ticket, for tests of what becomes of one."""

import msgspec

from vllm_ascend_pd.core.ticket import Ticket

_TICKET = Ticket(
    request_id="cmpl-1-0",
    remote_block_ids=[[1, 2, 3]],
    remote_block_size=[16],
    remote_engine_id="decode-0",
    remote_host="127.0.0.1",
    remote_port=5555,
    remote_tp_size=1,
    remote_cached_tokens=0,
    ticket_id=32 * "0",
    num_tokens=40,
)


def ticket_with(**fields: object) -> Ticket:
    """A ticket for 40 tokens in three blocks of 16, but for `fields`."""
    return msgspec.structs.replace(_TICKET, **fields)
