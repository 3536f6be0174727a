# SPDX-License-Identifier: Apache-2.0
"""A prefill rank's control plane where decode engines cannot be asked."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.scheduling import make_ticket
from harness.waiting import wait_until
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.prefill.peers import Peers
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport import loop
from vllm_ascend_pd.transport.side_channel import SideChannelClient

GRANT_TIMEOUT_S = 1.0
TICKET = make_ticket(10, [1])


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the clients of a test sent theirs."""
    sent: list[str] = []
    request = SideChannelClient.request

    def counted(client: SideChannelClient, endpoint: str, *args: Any) -> None:
        sent.append(endpoint)
        request(client, endpoint, *args)

    monkeypatch.setattr(SideChannelClient, "request", counted)
    return sent


@pytest.fixture
def make_peers() -> Iterator[Callable[[], Peers]]:
    made: list[Peers] = []

    def make() -> Peers:
        running_time = RunningTime()

        def make_sender(name: str) -> Sender:
            engine: Any = None  # nothing is written
            return Sender(
                name,
                engine,
                None,
                lambda transfer: None,
                running_time,
                PrefillObserver(),
                queue_size=1,
                ready_timeout_s=1.0,
                grant_wait_s=1.0,
            )

        peers = Peers(
            RankInfo("prefill", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,)),
            ConnectorConfig(),
            1.0,
            running_time,
            make_sender,
            check=lambda description: None,
            destinations=lambda layout, transfer: {},
            revoked=lambda transfer: None,
            told=lambda transfer: None,
            ended=lambda transfer: None,
            forget_sessions=lambda sessions: None,
            observer=PrefillObserver(),
        )
        made.append(peers)
        return peers

    yield make
    for peers in made:
        peers.close(5.0)


def test_an_engine_that_cannot_be_asked_does_not_keep_the_channel_from_others(
    make_peers: Callable[[], Peers], requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ may refuse at once: here it has no socket left."""
    monkeypatch.setattr(loop, "_MAX_SOCKETS", 2)  # which the mailbox takes
    peers = make_peers()
    peers.acquire(TICKET)
    opened = time.monotonic()
    transfer = Transfer("r", TICKET, PrefillTicket(opened + GRANT_TIMEOUT_S))
    peers.open([transfer])
    wait_until(lambda: transfer.failure is not None, 20)
    assert transfer.failure == "decode engine decode does not describe itself: nothing can be sent: Too many open files"
    assert 2 <= len(requests) <= 1 + (time.monotonic() - opened) / 0.05


def test_closing_while_an_engine_cannot_be_asked(
    make_peers: Callable[[], Peers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "_MAX_SOCKETS", 2)
    peers = make_peers()
    peers.acquire(TICKET)
    transfer = Transfer("r", TICKET, PrefillTicket(time.monotonic() + 60))
    peers.open([transfer])
    peers.close(5.0)
    assert caplog.records == []
