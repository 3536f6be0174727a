# SPDX-License-Identifier: Apache-2.0
"""What ends transfers on a prefill rank from outside: a decode rank that takes its ticket back, and another engine at
the decode engine's address. The rank's control thread alone, without sockets."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_sender import KEY, RANK, make_transfer

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.prefill_ticket import Destination
from vllm_ascend_pd.core.protocol import Revoke, WriterId
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.prefill.control import ControlPlane, DecodeEngine
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.transfer import Transfer

LISTED = "tcp://127.0.0.1:7"


@pytest.fixture
def control() -> Iterator[ControlPlane]:
    unused: Any = None
    engine: Any = SimpleNamespace(transport=None)
    caches: Any = SimpleNamespace(description=None)
    info = RankInfo("prefill", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
    made = ControlPlane(PrefillRank(info, ConnectorConfig(), unused, engine, caches), None, unused)
    yield made
    made.close(5.0)


def failure_after(control: ControlPlane, event: Callable[[Transfer], None]) -> str | None:
    """Returns why a granted transfer has failed after an event on the control thread; None if it has not."""
    failures: list[str | None] = []
    finished: list[Transfer] = []
    handled = threading.Event()

    def happens() -> None:
        transfer = make_transfer("a", 7)
        transfer.sender = SimpleNamespace(finish=finished.extend)  # type: ignore[assignment]
        rank = msgspec.structs.replace(RANK, control=LISTED)
        transfer.state.destinations = {KEY: Destination(rank, (0, 1), granted=True, asking=True)}
        control._transfers[transfer.number] = transfer
        event(transfer)
        control._transfers.clear()
        control._engines.clear()
        failures.append(transfer.state.failure)
        handled.set()

    assert control._client.call(happens)
    assert handled.wait(10)
    [failure] = failures
    assert bool(finished) == (failure is not None), "the sender is told"
    return failure


@pytest.mark.parametrize(("endpoint", "is_taken_back"), [(LISTED, True), ("tcp://127.0.0.1:8", False)])
def test_only_a_rank_of_the_tickets_engine_takes_it_back(
    control: ControlPlane, endpoint: str, is_taken_back: bool
) -> None:
    def revoked(transfer: Transfer) -> None:
        writer = WriterId("prefill", 0, 0, transfer.number)
        control._on_revoked(endpoint, Revoke(transfer.ticket.ticket_id, writer, "the client has left"))

    assert (failure_after(control, revoked) is not None) == is_taken_back


def test_another_engine_at_the_address_ends_the_transfers_of_the_one_before_it(control: ControlPlane) -> None:
    def met(transfer: Transfer) -> None:
        endpoint, old = transfer.ticket.issuer
        peers = [DecodeEngine(endpoint, engine_id, transfer.sender) for engine_id in (old, "second")]  # type: ignore[arg-type]
        control._engines.update({(endpoint, peer.engine_id): peer for peer in peers})
        control._take_over(peers[1])

    assert "engine decode has ended: second is at its address now" in str(failure_after(control, met))
