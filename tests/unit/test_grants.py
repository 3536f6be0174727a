# SPDX-License-Identifier: Apache-2.0
"""A decode rank and its control thread, without a prefill engine: messages are handed to them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_sender import GEOMETRY, THEIRS, Done

from harness.clock import clock_of
from vllm_ascend_pd.core import running_time
from vllm_ascend_pd.core.bounds import MAX_SHAPES_WORKED_OUT
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.decode_ticket import DecodeTicket
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.observer import Observer
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
from vllm_ascend_pd.core.topology import RankInfo, Sharding, TopologyError, sharding
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.decode import expected_writers, grants
from vllm_ascend_pd.decode.arrivals import ArrivalQueue
from vllm_ascend_pd.decode.grants import GrantService, OpenTicket
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.device.cpu import CpuEvent
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


class Alone:
    """A rank's control thread alone, with one ticket that any writer may ask for."""

    def __init__(self, vacated: Any = None) -> None:
        self.weights, self.connection = LoadedWeights("ours"), self.connect()
        caches = RankCaches((GEOMETRY,), THEIRS)
        self.service = GrantService(
            ConnectorConfig(), caches, 0, sharding(1), self.weights, ArrivalQueue(), Observer(), 5.0
        )
        ticket = DecodeTicket(TICKETS[0], DIGEST, time.monotonic() + 900, 900, 10.0)
        self.opened = OpenTicket(Expect("request", TICKETS[0], DIGEST, [7]), ticket, vacated or Done())
        self.service.begin_step([self.opened], DecodeStep(), time.monotonic())

    def connect(self) -> Any:
        """A connection that is closed as soon as something is sent on it."""
        return SimpleNamespace(send=lambda message, gone: gone())

    def ask(self, connection: Any = None, **changes: Any) -> Message:
        request = msgspec.structs.replace(request_for(TICKETS[0]), **changes)
        return self.service.handle(request, connection or self.connection)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"writer": WriterId("prefill", 0, 1, 1)}, "rank 1 of 1 ranks in a pipeline stage"),
        ({"weights": "theirs"}, "prefill computed with weights theirs, this engine has ours"),
    ],
)
def test_writers_that_get_no_grant(changes: dict[str, Any], reason: str) -> None:
    alone = Alone()
    refused = alone.ask(**changes)
    assert isinstance(refused, GrantRefused)
    assert reason in refused.reason
    assert not refused.retry
    assert isinstance(alone.ask(), Granted)


def test_blocks_are_granted_once_the_steps_before_the_ticket_have_ended() -> None:
    vacated = CpuEvent()
    alone = Alone(vacated)
    refused = alone.ask()
    assert isinstance(refused, GrantRefused)
    assert refused.retry
    vacated.set()
    assert isinstance(alone.ask(), Granted)


def test_a_report_of_one_who_does_not_know_the_ticket_ends_nothing() -> None:
    alone = Alone()
    alone.service.handle(msgspec.structs.replace(report_of(TICKETS[0]), digest="e" * 32), alone.connection)
    assert isinstance(alone.ask(), Granted)


def test_a_ticket_that_is_closed_is_not_asked_for_again() -> None:
    alone = Alone()
    alone.ask()
    alone.service.handle(report_of(TICKETS[0]), alone.connection)
    refused = alone.ask()
    assert isinstance(refused, GrantRefused)
    assert not refused.retry
    assert "closed" in refused.reason


def test_a_closed_connection_says_nothing_of_a_writer_that_has_another() -> None:
    alone = Alone()
    alone.ask()
    [writer] = alone.opened.connections
    alone.ask(connection=alone.connect())
    alone.service._connection_closed(alone.opened, writer, alone.connection)
    assert not alone.opened.ticket._leases[writer].gone
    alone.service._connection_closed(alone.opened, writer, alone.opened.connections[writer])
    assert alone.opened.ticket._leases[writer].gone


def test_a_rank_that_was_stopped_keeps_blocks_until_what_came_meanwhile_is_applied(monkeypatch) -> None:
    """Bytes of a failed write lie in its socket buffers, and so does the report that none is in flight."""
    clock = clock_of(grants, monkeypatch)
    monkeypatch.setattr(running_time, "time", clock)
    news, caches = ArrivalQueue(), RankCaches((GEOMETRY,), THEIRS)
    service = GrantService(ConnectorConfig(), caches, 0, sharding(1), LoadedWeights(), news, Observer(), 5.0)
    connection: Any = SimpleNamespace(send=lambda message, gone: None)

    def open_ticket(ticket: str) -> None:
        opened = DecodeTicket(ticket, DIGEST, clock.now + 900, 900, 10.0)
        service.begin_step([OpenTicket(Expect(ticket, ticket, DIGEST, [7]), opened, Done())], DecodeStep(), clock.now)
        assert isinstance(service.handle(request_for(ticket), connection), Granted)
        service.handle(report_of(ticket, settle_s=5.0), connection)

    def run(seconds: float) -> set[str]:
        """Returns the requests that have ended after this time."""
        for _ in range(round(10 * seconds)):
            clock.now += 0.1
            service.tick(clock.now)
        return news.take(0.0).closed

    first, second, third = (*TICKETS, "3" * 32)
    open_ticket(first)
    assert run(6.0) == set()
    clock.now += 30.0  # stopped
    service.handle(report_of(first), connection)
    assert run(4.8) == set()
    open_ticket(second)
    assert run(0.4) == {first}
    service.handle(report_of(second), connection)
    assert run(0.0) == {second}, "it was granted after the stop"
    run(6.0)
    open_ticket(third)
    service.handle(report_of(third), connection)
    assert run(0.0) == {third}, "the rank was not stopped, but had no ticket"


def test_a_ticket_with_ever_new_shapes_of_prefill_costs_no_more_than_a_few(rank: Rank) -> None:
    """Working out who writes may take long, and meanwhile the rank answers nobody."""
    rank.worker.start_step(DecodeStep([Expect(ticket, ticket, DIGEST, [7]) for ticket in TICKETS]))
    calls: list[Any] = []
    writers = rank.worker._grants._expected_writers
    expected, writers._expected = writers._expected, lambda *shape: calls.append(shape) or expected(*shape)
    asked = msgspec.structs.replace(request_for(TICKETS[0]), covers=(99,))
    for interleave in range(1, 30):
        asked = msgspec.structs.replace(asked, sharding=Sharding(1, (0, 1), interleave))
        answer = rank.handle(asked)
        assert isinstance(answer, GrantRefused)
    assert answer.reason == "prefill engines of 4 shapes have asked for this ticket"
    assert len(calls) == 4
    assert isinstance(rank.handle(request_for(TICKETS[1])), Granted)
    assert len(calls) == 5


def test_writers_that_were_worked_out_are_kept_within_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(expected_writers, "MAX_CACHED_WRITES", 10)
    calls: list[int] = []

    def expected(prefill: Sharding, replica: int, draft: str) -> frozenset[tuple[int, int]]:
        calls.append(replica)
        if replica == 9:
            raise TopologyError("they do not fit")
        return frozenset((tensor, 0) for tensor in range(4))

    writers = expected_writers.ExpectedWriters(expected)

    def of(replica: int) -> object:
        each: Any = SimpleNamespace(shapes_worked_out=0)
        return writers.of(each, sharding(1), replica, "")

    for replica in (0, 1, 0, 2, 0, 1):
        of(replica)
    assert calls == [0, 1, 2, 1], "two results of four pairs and a rank"
    for _ in range(2):
        with pytest.raises(TopologyError, match="they do not fit"):
            of(9)
    assert calls == [0, 1, 2, 1, 9]


def test_no_more_writers_are_worked_out_than_an_engine_can_have(monkeypatch) -> None:
    monkeypatch.setattr(expected_writers, "MAX_EXPECTED_WRITES", 1)
    with pytest.raises(TopologyError, match="more than 1 pairs of a tensor and its writer"):
        expected_writers.expected_writers(RankCaches((GEOMETRY,), THEIRS), 0, sharding(1), sharding(1), 0, "")


def test_a_ticket_pays_for_the_shapes_of_a_few_prefill_engines() -> None:
    """What is known already costs it nothing."""
    writers = expected_writers.ExpectedWriters(lambda prefill, replica, draft: frozenset({(0, 0)}))
    each: Any = SimpleNamespace(shapes_worked_out=0)
    shapes = [sharding(1 << size) for size in range(MAX_SHAPES_WORKED_OUT + 1)]
    for shape in shapes[:-1]:
        writers.of(each, shape, 0, "")
    with pytest.raises(TopologyError, match="have asked for this ticket"):
        writers.of(each, shapes[-1], 0, "")
    assert writers.of(each, shapes[0], 0, "") == {(0, 0)}
