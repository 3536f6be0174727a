# SPDX-License-Identifier: Apache-2.0
"""What the clients that send tickets have in common. Nothing is sent."""

import asyncio
import threading
from contextlib import closing

from harness.waiting import wait_for
from vllm_ascend_pd.decode.ticket_client import PostOutcome, TicketClient

SOON_S = 10


def test_work_that_ends_while_it_is_cancelled_does_not_end_what_begins_in_its_place() -> None:
    """`keep` has just failed when `offer` begins under the same key."""
    with closing(TicketClient("test-tickets")) as client:
        begun, may_end = threading.Event(), threading.Event()

        async def offer() -> PostOutcome:
            begun.set()
            while not may_end.is_set():
                await asyncio.sleep(0.01)
            return PostOutcome("ticket", ok=True)

        async def keep() -> PostOutcome:
            client.cancel("ticket")
            client._begin("ticket", offer)
            return PostOutcome("ticket", ok=False, reason="prefill does not hold it")

        client._begin("ticket", keep)
        assert begun.wait(SOON_S)  # the loop has run what came before
        assert client.poll() == []
        may_end.set()
        assert wait_for(client.poll, bool, SOON_S) == [PostOutcome("ticket", ok=True)]
        assert client._open == {}
