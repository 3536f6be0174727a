# SPDX-License-Identifier: Apache-2.0
"""A prefill rank's control plane if decode engines cannot be asked."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.scheduling import make_ticket
from harness.waiting import wait_until
from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.prefill.control import ControlPlane
from vllm_ascend_pd.prefill.decode_layout import RankMappings
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport import loop
from vllm_ascend_pd.transport.side_channel import SideChannelClient

GRANT_TIMEOUT_S = 1.0
TICKET = make_ticket(10, [1])


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that the clients of a test sent."""
    sent: list[str] = []
    request = SideChannelClient.request

    def counted(client: SideChannelClient, endpoint: str, *args: Any) -> None:
        sent.append(endpoint)
        request(client, endpoint, *args)

    monkeypatch.setattr(SideChannelClient, "request", counted)
    return sent


@pytest.fixture
def make_control() -> Iterator[Callable[[], ControlPlane]]:
    made: list[ControlPlane] = []

    def make() -> ControlPlane:
        # Nothing is written.
        engine: Any = SimpleNamespace(limits=SimpleNamespace(settle_s=1.0), transport=TransportInfo("tcp"))
        device: Any = None
        caches = RegisteredCaches(RankCaches((), ()), (), {})
        info = RankInfo("prefill", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
        rank = PrefillRank(info, ConnectorConfig(), device, engine, caches)
        made.append(ControlPlane(rank, None, RankMappings(info, caches.description)))
        return made[-1]

    yield make
    for control in made:
        control.close(5.0)


def open_transfer(control: ControlPlane, grant_timeout_s: float) -> Transfer:
    state = PrefillTicket(time.monotonic() + grant_timeout_s)
    transfer = Transfer("r", TICKET, control.acquire(TICKET), state)
    control.open([transfer])
    return transfer


def test_an_engine_that_cannot_be_asked_does_not_keep_the_channel_from_others(
    make_control: Callable[[], ControlPlane], requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ may refuse at once. Here it has no socket left."""
    monkeypatch.setattr(loop, "_MAX_SOCKETS", 2)  # which the mailbox takes
    opened = time.monotonic()
    transfer = open_transfer(make_control(), GRANT_TIMEOUT_S)
    wait_until(lambda: transfer.state.failure is not None, 20)
    assert (
        transfer.state.failure
        == "decode engine decode does not describe itself: nothing can be sent: Too many open files"
    )
    assert 2 <= len(requests) <= 1 + (time.monotonic() - opened) / 0.05


def test_closing_while_an_engine_cannot_be_asked(
    make_control: Callable[[], ControlPlane], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "_MAX_SOCKETS", 2)
    control = make_control()
    open_transfer(control, 60)
    control.close(5.0)
    assert caplog.records == []
