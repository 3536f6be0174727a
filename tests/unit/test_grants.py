# SPDX-License-Identifier: Apache-2.0
"""A decode rank and its control thread, without a prefill engine: messages are handed to them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from test_sender import GEOMETRY, THEIRS, Done

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.protocol import (
    Granted,
    GrantRefused,
    GrantRequest,
    Message,
    Revoke,
    TransportInfo,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.step import DecodeStep, Expect
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.transport.batches import TransferLimits

TICKETS, DIGEST = ("1" * 32, "2" * 32), "d" * 32


def writer_of(ticket: str) -> WriterId:
    return WriterId("prefill", 0, 0, int(ticket[0]))


def request_for(ticket: str) -> GrantRequest:
    return GrantRequest(ticket, DIGEST, writer_of(ticket), sharding(1), (0, 1), 5.0)


def report_of(ticket: str, settle_s: float = 0.0) -> WriteReport:
    return WriteReport(ticket, writer_of(ticket), "it was revoked", settle_s=settle_s, digest=DIGEST)


class Rank:
    """A decode rank, whose transfer engine only notes whether its memory is registered."""

    def __init__(self) -> None:
        self.registered, self.revoked = True, threading.Event()
        engine: Any = SimpleNamespace(
            session="127.0.0.1:1",
            transport=TransportInfo("tcp"),
            limits=TransferLimits(),
            suspend=lambda: setattr(self, "registered", False),
        )
        device: Any = SimpleNamespace(record_event=Done, idle=lambda timeout_s: None)
        caches: Any = SimpleNamespace(description=RankCaches((GEOMETRY,), THEIRS))
        info = RankInfo("decode", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
        self.worker = DecodeWorker(info, ConnectorConfig(), device, engine, caches)
        self._connection: Any = SimpleNamespace(send=lambda message, gone: self._sent(message))

    def _sent(self, message: Message) -> None:
        assert isinstance(message, Revoke)
        self.revoked.set()

    def handle(self, message: Message) -> Message:
        """Returns the rank's answer to a prefill rank."""
        answers: list[Message] = []
        answered = threading.Event()

        def on_control_thread() -> None:
            answers.append(self.worker._grants.handle(message, self._connection))
            answered.set()

        assert self.worker._server.call(on_control_thread)
        assert answered.wait(10)
        return answers[0]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.worker.close(5.0)


def test_a_rank_sleeps_only_when_its_writers_have_stopped(rank: Rank) -> None:
    rank.worker.start_step(DecodeStep([Expect(ticket, ticket, DIGEST, [7]) for ticket in TICKETS]))
    for ticket in TICKETS:
        assert isinstance(rank.handle(request_for(ticket)), Granted)
    answers: list[Message] = []
    registered: list[bool] = []

    def prefill() -> None:
        """Of one ticket no byte is in flight. Of the other one a write has failed, and settles later."""
        rank.revoked.wait(10)
        answers.append(rank.handle(request_for(TICKETS[0])))
        rank.handle(report_of(TICKETS[0]))
        rank.handle(report_of(TICKETS[1], settle_s=1.0))
        time.sleep(0.05)
        registered.append(rank.registered)
        rank.handle(report_of(TICKETS[1]))

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(prefill)
        began = time.monotonic()
        rank.worker.sleep()
        assert time.monotonic() - began < 5
        writer.result()
    assert isinstance(answers[0], GrantRefused)
    assert (registered, rank.registered) == ([True], False)


def test_a_rank_without_tickets_sleeps_at_once(rank: Rank) -> None:
    began = time.monotonic()
    rank.worker.sleep()
    assert time.monotonic() - began < 5
    assert not rank.registered
