# SPDX-License-Identifier: Apache-2.0
"""A layer's way through a sender, with an engine that only notes what is written."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from harness.tickets import ticket_with
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Order, RankCaches
from vllm_ascend_pd.core.plan import Route, make_route
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket
from vllm_ascend_pd.core.protocol import EngineDescription, Granted, RankDescription
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.device.base import DeviceError, Event
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_send import LayerPush, StepSend, plan_sends
from vllm_ascend_pd.prefill.transfer import Transfer, Withdrawals
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.writer import TransferError

KEY = (0, 0)
BLOCK, TOKEN_BYTES = 16, 8
BLOCK_BYTES = BLOCK * TOKEN_BYTES
GEOMETRY = Geometry(
    group=0,
    order=Order.TOKEN_MAJOR,
    dtype="bfloat16",
    block_size=BLOCK,
    block_stride=BLOCK_BYTES,
    heads=1,
    total_heads=1,
    head_bytes=TOKEN_BYTES,
)
LAYERS = ("layers.0", "layers.1")
OURS = [CacheTensor(layer, 0, 1_000_000 * (n + 1), 100, 0) for n, layer in enumerate(LAYERS)]
THEIRS = tuple(CacheTensor(layer, 0, 1_000_000_000 * (n + 1), 100, 0) for n, layer in enumerate(LAYERS))
RANK = RankDescription(*KEY, "", "peer", RankCaches((GEOMETRY,), THEIRS))
LAYOUT = DecodeLayout(EngineDescription("decode", "model", 1, 1, (RANK,)))
ROUTE = make_route(GEOMETRY, 0, sharding(1), sharding(1), BLOCK)


class Engine:
    """Notes what arrives as (source, destination, bytes). A write that has a destination in `lost` fails."""

    limits = TransferLimits()

    def __init__(self) -> None:
        self.arrived: list[tuple[int, int, int]] = []
        self.lost: set[int] = set()
        # Whether bytes of a lost write may still arrive.
        self.may_arrive = False

    def has_room(self, session: str, batch: Any) -> bool:
        return True

    def begin(self, session: str, batch: Any, may_begin: Callable[[], bool]) -> None:
        assert session == "peer"
        if not may_begin():
            raise TransferError(session, "the lease has ended", retryable=False)
        copies = list(zip(*batch, strict=True))
        if self.lost & {dst for _, dst, _ in copies}:
            raise TransferError(session, "it is lost", retryable=False, may_arrive=self.may_arrive)
        self.arrived += copies

    def write_batches(self, session: str, batches: Iterable[Any], may_begin: Callable[[], bool]) -> None:
        for batch in batches:
            self.begin(session, batch, may_begin)


class Done(Event):
    def wait(self, timeout_s: float) -> None:
        pass

    def is_done(self) -> bool:
        return True


class Failed(Done):
    def wait(self, timeout_s: float) -> None:
        raise DeviceError("an all-to-all failed")


def make_transfer(name: str, d_block: int, lease_s: float = 60.0) -> Transfer:
    """A request of one block, which decode has granted."""
    ticket = ticket_with(
        request_id=name,
        remote_block_ids=[[d_block]],
        remote_block_size=[BLOCK],
        remote_engine_id="decode",
        remote_port=1,
        ticket_id=name * 16,
        num_tokens=BLOCK,
    )
    sender: Any = None
    transfer = Transfer(name, ticket, sender, PrefillTicket(time.monotonic() + 60), WITHDRAWALS)
    now = time.monotonic()
    with transfer.changing() as state:
        state.contacted({KEY: Destination(RANK, (0, 1))})
        state.asked(KEY, now)
        state.answered(KEY, now, Granted(lease_s))
    return transfer


WITHDRAWALS = Withdrawals()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@contextmanager
def sending(engine: Any) -> Iterator[Sender]:
    """A sender that knows the decode engine."""
    unused: Any = None
    rank = PrefillRank(unused, ConnectorConfig(), unused, engine, unused)
    sender = Sender("sender", rank, None, lambda transfers: None)
    sender.engine_described(LAYOUT)
    try:
        yield sender
    finally:
        sender.close(10)


@pytest.fixture
def sender(engine: Engine) -> Iterator[Sender]:
    with sending(engine) as sender:
        yield sender


def write(sender: Sender, *pushes: LayerPush) -> None:
    """Writes layers, of which all have come when the first one's turn comes."""
    all_put = threading.Event()
    sender._tasks.put(all_put.wait)
    for push in pushes:
        sender.put_layer(push, 1.0)
    passed = sender.barrier()
    all_put.set()
    assert passed.wait(10)
    sender.check()


@pytest.fixture
def transfers() -> list[Transfer]:
    return [make_transfer("a", 7), make_transfer("b", 9)]


def plan(transfers: list[Transfer], route: Route = ROUTE, slot_units: int = 0) -> list[StepSend]:
    """Request n is in our block 2 * n + 1."""
    device: Any = SimpleNamespace(upload=lambda tensor: tensor)
    slices = [(each, Send("", 0, BLOCK, ([2 * n + 1],), last=False)) for n, each in enumerate(transfers)]
    return plan_sends(route, GEOMETRY, slices, device, slot_units, len(LAYERS))


def pushes(transfers: list[Transfer]) -> list[LayerPush]:
    """Both layers of a step with these requests."""
    [step_send] = plan(transfers)
    return [LayerPush(tensor.layer, step_send, [tensor], Done(), Done()) for tensor in OURS]


def copy_of(layer: int, p_block: int, d_block: int) -> tuple[int, int, int]:
    return OURS[layer].base + p_block * BLOCK_BYTES, THEIRS[layer].base + d_block * BLOCK_BYTES, BLOCK_BYTES


def test_f32_a_write_of_one_request_marks_only_that_request_in_flight(engine, sender, transfers):
    """The write for both fails with nothing on its way, then that of the first request alone."""
    engine.lost = {copy_of(0, 1, 7)[1]}
    begin = engine.begin

    def fails(session: str, batch: Any, may_begin: Callable[[], bool]) -> None:
        engine.may_arrive = len(batch[0]) == 1
        begin(session, batch, may_begin)

    engine.begin = fails
    write(sender, pushes(transfers)[0])
    assert transfers[0].in_flight_until > 0
    assert transfers[1].in_flight_until < 0
    assert transfers[1].failure is None


def staged_route(**fields: Any) -> Route:
    return Route(BLOCK, ROUTE.targets, planes=1, entries=BLOCK, source_row=TOKEN_BYTES, plane_row=TOKEN_BYTES, **fields)


def test_a_rank_that_only_exchanges_writes_nothing_and_needs_no_grant(engine, sender):
    """But its layers end like others: whether the exchange has failed decides what it reports."""
    ungranted = make_transfer("a", 7, lease_s=0.0)
    [send] = plan([ungranted], staged_route(ranks=(0, 1), index=1), slot_units=2)
    assert (len(send.units), send.share) == (0, 1)
    write(sender, LayerPush(LAYERS[0], send, [OURS[0]], Done(), Done()))
    assert (engine.arrived, ungranted.failure) == ([], None)

    write(sender, LayerPush(LAYERS[1], send, [OURS[1]], Done(), Failed()))
    assert ungranted.failure is not None
    assert "an all-to-all failed" in ungranted.failure


# --- layers that leave together --------------------------------------------------------------------------------


class Calls(Engine):
    """Notes the destinations of each batch, which stays in flight until `proceed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.in_flight = 0
        self.begun, self.proceed = threading.Semaphore(0), threading.Event()

    def has_room(self, session: str, batch: Any) -> bool:
        return self.in_flight == 0  # as over ascend: a peer has one batch at a time

    def begin(self, session: str, batch: Any, may_begin: Callable[[], bool]) -> Any:
        self.calls.append(list(batch[1]))
        super().begin(session, batch, may_begin)
        self.in_flight += 1
        self.begun.release()
        return SimpleNamespace(session=session, wait=self._wait)

    def _wait(self) -> None:
        assert self.proceed.wait(10)
        self.in_flight -= 1


def destinations(*layers: int) -> list[int]:
    """Of both requests in these layers."""
    return [1_000_000_000 * (layer + 1) + block * BLOCK_BYTES for layer in layers for block in (7, 9)]


def test_of_layers_that_left_together_each_is_written_again_by_itself(engine, sender, transfers):
    """So only the request at fault fails, and the other one has all of its layers."""
    engine.lost = {destinations(1)[0]}
    first, second = pushes(transfers)
    write(sender, first, second)
    assert [transfer.failure is None for transfer in transfers] == [False, True]
    assert {dst for _, dst, _ in engine.arrived} >= {destinations(layer)[1] for layer in range(2)}
    assert transfers[1].written[KEY][0] == 2 * BLOCK_BYTES


def test_a_joined_batch_does_not_begin_once_a_lease_has_ended(engine, sender):
    first, second = pushes([make_transfer("a", 7, lease_s=0.05)])
    time.sleep(0.1)
    write(sender, first, second)
    assert engine.arrived == []


def test_of_layers_that_would_leave_together_all_end_if_one_cannot_be_read(sender, transfers, monkeypatch):
    """Or their staging slots would stay taken."""
    ended: list[LayerPush] = []
    monkeypatch.setattr(Sender, "_end", lambda sender, push: ended.append(push))
    first, second = pushes(transfers)
    third = dataclasses.replace(second)
    second.ready = Failed()
    write(sender, first, second, third)
    assert [id(push) for push in ended] == [id(first), id(second), id(third)]
    assert all(transfer.failure is not None for transfer in transfers)


def test_an_idle_link_gets_a_layer_at_once_and_a_busy_one_those_that_have_come(transfers):
    calls = Calls()
    with sending(calls) as sender:
        layers = [*pushes(transfers), *pushes(transfers)]
        alone = pushes(transfers)[0]
        sender.put_layer(alone, 1.0)
        assert calls.begun.acquire(timeout=10), "nothing else was put"
        for push in layers:
            sender.put_layer(push, 1.0)
        passed = sender.barrier()
        time.sleep(0.05)
        assert len(calls.calls) == 1
        calls.proceed.set()
        assert passed.wait(10)
        assert calls.calls == [destinations(0), destinations(0, 1), destinations(0, 1)]


# --- KV that vLLM took back -------------------------------------------------------------------------------------


class Roomy(Calls):
    def has_room(self, session: str, batch: Any) -> bool:
        return True


def test_what_replaces_kv_that_vllm_took_back_is_not_overtaken_by_it(transfers):
    calls = Roomy()
    with sending(calls) as sender:
        all_put = threading.Event()
        sender._tasks.put(all_put.wait)
        for _ in range(2):
            sender.put_layer(pushes(transfers)[0], 1.0)
        passed = sender.barrier()
        all_put.set()
        assert calls.begun.acquire(timeout=10)
        assert not calls.begun.acquire(timeout=0.05)
        calls.proceed.set()
        assert passed.wait(10)
        assert calls.calls == [destinations(0), destinations(0)]


def test_a_failed_write_may_still_deliver_kv_that_vllm_took_back(sender, transfers):
    for transfer in transfers:
        transfer.mark_in_flight(1.0)
    transfers[0].again = True
    sender.finish(transfers)
    assert sender.barrier().wait(10)
    sender.check()
    assert "took back" in str(transfers[0].failure)
    assert transfers[1].failure is None
