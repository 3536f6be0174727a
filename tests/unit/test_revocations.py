# SPDX-License-Identifier: Apache-2.0
"""Who may take a ticket back from a prefill rank, whose control thread gets the message."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_sender import KEY, RANK, make_transfer

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.prefill_ticket import Destination
from vllm_ascend_pd.core.protocol import Revoke, WriterId
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.prefill.control import ControlPlane
from vllm_ascend_pd.prefill.rank import PrefillRank

LISTED = "tcp://127.0.0.1:7"


@pytest.mark.parametrize(("endpoint", "is_taken_back"), [(LISTED, True), ("tcp://127.0.0.1:8", False)])
def test_only_a_rank_of_the_tickets_engine_takes_it_back(endpoint: str, is_taken_back: bool) -> None:
    unused: Any = None
    engine: Any = SimpleNamespace(transport=None)
    caches: Any = SimpleNamespace(description=None)
    info = RankInfo("prefill", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
    control = ControlPlane(PrefillRank(info, ConnectorConfig(), unused, engine, caches), None, unused)
    transfers: list[Any] = []
    finished: list[Any] = []
    handled = threading.Event()

    def revoke() -> None:
        transfers.append(transfer := make_transfer("a", 7))  # this thread owns it
        transfer.sender = SimpleNamespace(finish=finished.extend)  # type: ignore[assignment]
        rank = msgspec.structs.replace(RANK, control=LISTED)
        transfer.state.destinations = {KEY: Destination(rank, (0, 1), granted=True, asking=True)}
        control._transfers[transfer.number] = transfer
        writer = WriterId("prefill", 0, 0, transfer.number)
        control._on_revoked(endpoint, Revoke(transfer.ticket.ticket_id, writer, "the client has left"))
        control._transfers.clear()
        handled.set()

    try:
        assert control._client.call(revoke)
        assert handled.wait(10)
    finally:
        control.close(5.0)
    assert (transfers[0].failure is not None) == is_taken_back
    assert bool(finished) == is_taken_back
