# SPDX-License-Identifier: Apache-2.0
"""A layer's way through a sender, with an engine that only notes what is written."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import LayerTensors
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Order, RankCaches
from vllm_ascend_pd.core.observer import Observer, StepEnded
from vllm_ascend_pd.core.plan import RankMapping, make_mapping
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket, RankKey
from vllm_ascend_pd.core.protocol import EngineDescription, Granted, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.step import PrefillStep, Send
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.device.cpu import CpuEvent
from vllm_ascend_pd.device.event import DeviceError, Event
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import StagingRing
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_plan import Planner, StepPlan
from vllm_ascend_pd.prefill.step_send import LayerPush, Slot, StepSend, plan_sends
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.prefill.worker import PrefillWorker
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
MAPPING = make_mapping(GEOMETRY, 0, sharding(1), sharding(1), BLOCK)


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


class Held(Event):
    """Happens when it is let go, and `event` has happened."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._let_go = CpuEvent()

    def wait(self, timeout_s: float) -> None:
        self._let_go.wait(timeout_s)
        self._event.wait(timeout_s)

    def is_done(self) -> bool:
        return self._let_go.is_done() and self._event.is_done()

    def let_go(self) -> None:
        self._let_go.set()


def make_transfer(name: str, d_block: int, lease_s: float = 60.0, keys: Sequence[RankKey] = (KEY,)) -> Transfer:
    """A request of one block, which these decode ranks have granted."""
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
    transfer = Transfer(name, ticket, sender, PrefillTicket(time.monotonic() + 60))
    now = time.monotonic()
    transfer.state.contacted({key: Destination(RANK, (0, 1)) for key in keys})
    for key in keys:
        transfer.state.asked(key, now)
        transfer.state.answered(key, now, Granted(lease_s))
    return transfer


@pytest.fixture
def engine() -> Engine:
    return Engine()


@contextmanager
def sending(
    engine: Any,
    layout: DecodeLayout = LAYOUT,
    ring: StagingRing | None = None,
    running_time: Any = None,
    on_writing_ended: Callable[..., None] = lambda transfers: None,
) -> Iterator[Sender]:
    """A sender that knows the decode engine."""
    unused: Any = None
    rank = PrefillRank(unused, ConnectorConfig(), unused, engine, unused, running_time=running_time or RunningTime())
    sender = Sender("sender", rank, ring, on_writing_ended)
    sender.engine_described(layout)
    try:
        yield sender
    finally:
        sender.close(10)


@pytest.fixture
def sender(engine: Engine) -> Iterator[Sender]:
    with sending(engine) as sender:
        yield sender


def write(sender: Sender, *pushes: LayerPush) -> None:
    """Writes layers, of which all have come when the first one can be read."""
    pushes[0].ready = first = Held(pushes[0].ready)
    for push in pushes:
        sender.put_layer(push)
    passed = sender.barrier()
    first.let_go()
    assert passed.wait(10)
    sender.check()


@pytest.fixture
def transfers() -> list[Transfer]:
    return [make_transfer("a", 7), make_transfer("b", 9)]


def plan(transfers: list[Transfer], mapping: RankMapping = MAPPING, slot_units: int = 0) -> list[StepSend]:
    """Request n is in our block 2 * n + 1."""
    device: Any = SimpleNamespace(upload=lambda tensor: tensor)
    slices = [(each, Send("", 0, BLOCK, ([2 * n + 1],), last=False)) for n, each in enumerate(transfers)]
    return plan_sends(mapping, GEOMETRY, slices, device, slot_units)


def pushes(transfers: list[Transfer]) -> list[LayerPush]:
    """Both layers of a step with these requests."""
    [step_send] = plan(transfers)
    return [LayerPush(tensor.layer, step_send, [tensor], Done(), Done()) for tensor in OURS]


def copy_of(layer: int, p_block: int, d_block: int) -> tuple[int, int, int]:
    return OURS[layer].base + p_block * BLOCK_BYTES, THEIRS[layer].base + d_block * BLOCK_BYTES, BLOCK_BYTES


def test_a_failed_write_of_one_request_marks_only_that_request_in_flight(engine, sender, transfers):
    """The write for both fails with nothing on its way, then that of the first request alone."""
    engine.lost = {copy_of(0, 1, 7)[1]}
    begin = engine.begin

    def fails(session: str, batch: Any, may_begin: Callable[[], bool]) -> None:
        engine.may_arrive = len(batch[0]) == 1
        begin(session, batch, may_begin)

    engine.begin = fails
    write(sender, pushes(transfers)[0])
    assert transfers[0].state.settled_at > 0
    assert transfers[1].state.settled_at < 0
    assert transfers[1].state.failure is None


def test_of_a_rank_that_does_not_answer_one_request_waits_for_it_and_all_fail(engine, sender, transfers):
    asked = []

    def fails(session: str, batch: Any, may_begin: Callable[[], bool]) -> None:
        asked.append(len(batch[0]))
        raise TransferError(session, "no answer to a probe", retryable=True, no_answer=True)

    engine.begin = fails
    write(sender, pushes(transfers)[0])
    assert asked == [2, 1, 1]
    assert all("no answer to a probe" in str(transfer.state.failure) for transfer in transfers)


def staged_mapping(**fields: Any) -> RankMapping:
    return RankMapping(
        BLOCK, MAPPING.portions, planes=1, entries=BLOCK, source_row=TOKEN_BYTES, plane_row=TOKEN_BYTES, **fields
    )


def test_a_rank_that_only_exchanges_writes_nothing_and_needs_no_grant(engine, sender):
    """But its layers end like others: whether the exchange has failed decides what it reports."""
    ungranted = make_transfer("a", 7, lease_s=0.0)
    [send] = plan([ungranted], staged_mapping(ranks=(0, 1), index=1), slot_units=2)
    assert (len(send.units), send.plane_units) == (0, 1)
    write(sender, LayerPush(LAYERS[0], send, [OURS[0]], Done(), Done()))
    assert (engine.arrived, ungranted.state.failure) == ([], None)

    write(sender, LayerPush(LAYERS[1], send, [OURS[1]], Done(), Failed()))
    assert ungranted.state.failure is not None
    assert "an all-to-all failed" in ungranted.state.failure


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


def test_a_layer_that_cannot_be_read_yet_holds_up_none_before_it(transfers):
    calls = Calls()
    with sending(calls) as sender:
        first, second = pushes(transfers)
        first.ready, second.ready = held, _ = Held(Done()), CpuEvent()
        sender.put_layer(first)
        sender.put_layer(second)
        passed = sender.barrier()
        held.let_go()
        assert calls.begun.acquire(timeout=5)
        second.ready.set()
        calls.proceed.set()
        assert passed.wait(10)
    assert calls.calls == [destinations(0), destinations(1)]


def test_a_layer_is_written_once_its_checksums_are_taken(transfers):
    """Or the report of its success would lack them."""
    calls, taken = Calls(), CpuEvent()
    calls.proceed.set()
    [step_send] = plan(transfers)
    worker: Any = PrefillWorker.__new__(PrefillWorker)
    worker._rank, worker._observer = SimpleNamespace(config=ConnectorConfig()), Observer()
    worker._device = SimpleNamespace(submit=lambda work, after: taken)
    worker._regrouper = worker._turns = None
    tensors = LayerTensors((OURS[0],), (torch.empty(0),))
    worker._caches = SimpleNamespace(layers_by_geometry={LAYERS[0]: {0: tensors}}, quantize={})
    with sending(calls) as sender:
        checksums: Any = object()
        for transfer in step_send.transfers:
            transfer.sender = sender
        worker._put_layer(StepPlan(sends={0: [step_send]}, checksums={0: [checksums]}), LAYERS[0], Done())
        assert not calls.begun.acquire(timeout=0.05)
        taken.set()
        assert sender.barrier().wait(10)
    assert calls.calls == [destinations(0)]


OTHER_RANK = RankDescription(1, 0, "", "other", RankCaches((GEOMETRY,), THEIRS[1:]))
FURTHER_APART = msgspec.structs.replace(GEOMETRY, block_stride=2 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("ranks", "second_at"),
    [
        ((msgspec.structs.replace(RANK, caches=RankCaches((GEOMETRY,), THEIRS[:1])), OTHER_RANK), ("other", 1)),
        (
            (
                msgspec.structs.replace(
                    RANK,
                    caches=RankCaches(
                        (GEOMETRY, FURTHER_APART), (THEIRS[0], msgspec.structs.replace(THEIRS[1], geometry=1))
                    ),
                ),
            ),
            ("peer", 2),
        ),
    ],
    ids=["to another decode rank", "to caches of another geometry"],
)
def test_layers_whose_writes_differ_do_not_leave_together(ranks, second_at) -> None:
    layout = DecodeLayout(EngineDescription("decode", "model", len(ranks), 1, ranks))
    keys = [(rank.pp_rank, rank.tp_rank) for rank in ranks]
    engine, written = Engine(), []
    engine.begin = lambda session, batch, may_begin: written.append((session, list(batch[1])))
    with sending(engine, layout) as sender:
        write(sender, *pushes([make_transfer("a", 7, keys=keys)]))
    session, stride = second_at
    assert written == [
        ("peer", [THEIRS[0].base + 7 * BLOCK_BYTES]),
        (session, [THEIRS[1].base + 7 * stride * BLOCK_BYTES]),
    ]


@pytest.mark.parametrize(
    ("limits", "layers"),
    [
        ({"max_descriptors": 4, "max_bytes": 4 * BLOCK_BYTES}, [(0, 1), (0, 1)]),
        ({"max_descriptors": 3}, [(0,), (1,), (0,), (1,)]),
        ({"max_bytes": 4 * BLOCK_BYTES - 1}, [(0,), (1,), (0,), (1,)]),
        ({}, [(0, 1, 0, 1)]),
    ],
)
def test_a_batch_of_several_layers_keeps_to_the_limits(transfers, limits, layers) -> None:
    calls = Calls()
    calls.limits = TransferLimits(connections=1, **limits)
    calls.proceed.set()
    with sending(calls) as sender:
        both = pushes(transfers)
        write(sender, *both, *map(dataclasses.replace, both))
    assert calls.calls == [destinations(*together) for together in layers]


def test_no_more_than_eight_layers_leave_together(transfers) -> None:
    """Their staging slots become free together, too."""
    calls = Calls()
    calls.proceed.set()
    with sending(calls) as sender:
        write(sender, *map(dataclasses.replace, 5 * pushes(transfers)))
    assert [len(batch) for batch in calls.calls] == [8 * 2, 2 * 2]


@pytest.mark.parametrize("may_arrive", [False, True])
def test_a_slot_is_used_again_only_when_nothing_reads_it(engine, may_arrive: bool) -> None:
    now = 100.0
    running: Any = lambda: now  # noqa: E731 - it stands for an object
    ring = StagingRing(torch.zeros(BLOCK_BYTES, dtype=torch.uint8), BLOCK_BYTES, 1, running)
    [send] = plan([make_transfer("a", 7)], staged_mapping(), slot_units=1)
    slot = ring.take(send)
    assert slot is not None
    push = LayerPush(LAYERS[0], send, [OURS[0]], Done(), Done())
    push.fill(slot)
    engine.lost, engine.may_arrive = {destinations(0)[0]}, may_arrive
    with sending(engine, ring=ring, running_time=running) as sender:
        write(sender, push)
        assert (ring.take(send) is None) is may_arrive
        now += engine.limits.settle_s - 0.1
        assert (ring.take(send) is None) is True
        now += 0.2
        assert (ring.take(send) is not None) is may_arrive


def test_an_error_at_the_end_of_transfers_ends_the_sender_and_fails_no_other_request(transfers) -> None:
    """The next layer waits for its turn then."""

    def fail(ended: object) -> None:
        raise ValueError("a bug")

    calls, others = Calls(), [make_transfer("c", 11)]
    calls.proceed.set()
    with sending(calls, on_writing_ended=fail) as sender:
        first = pushes(transfers)[0]
        first.ready = held = Held(Done())
        sender.put_layer(first)
        sender.finish(transfers)
        sender.put_layer(pushes(others)[0])
        held.let_go()
        sender._thread.join(5)
        assert sender.has_ended
        with pytest.raises(RuntimeError, match="an error of its own"):
            sender.check()
    assert others[0].state.failure is None


def test_of_layers_that_left_together_each_is_written_again_by_itself(engine, sender, transfers):
    """So only the request at fault fails, and the other one has all of its layers."""
    engine.lost = {destinations(1)[0]}
    first, second = pushes(transfers)
    write(sender, first, second)
    assert [transfer.state.failure is None for transfer in transfers] == [False, True]
    assert {dst for _, dst, _ in engine.arrived} >= {destinations(layer)[1] for layer in range(2)}
    assert transfers[1].state.destinations[KEY].num_bytes == 2 * BLOCK_BYTES


def test_a_joined_batch_does_not_begin_once_a_lease_has_ended(engine, sender):
    first, second = pushes([make_transfer("a", 7, lease_s=0.05)])
    time.sleep(0.1)
    write(sender, first, second)
    assert engine.arrived == []


def test_layers_that_left_together_without_bytes_are_not_written(engine, sender, transfers):
    """All units of the request that has not failed are another rank's."""
    [send] = plan(transfers, staged_mapping(ranks=(0, 1), index=0), slot_units=2)
    first, second = (LayerPush(tensor.layer, send, [tensor], Done(), Done()) for tensor in OURS)
    for push in (first, second):
        push.fill(Slot(0, 4096))
    transfers[0].state.fail("its client has left", PushFailure.ABORTED)
    sender._ring = SimpleNamespace(release=lambda slot, settled_at: None, free_rested=lambda: False)
    begun: list[object] = []
    engine.begin = lambda session, batch, may_begin: begun.append(batch)
    write(sender, first, second)
    assert begun == []
    assert transfers[1].state.failure is None


def test_of_layers_that_would_leave_together_all_end_if_one_cannot_be_read(sender, transfers, monkeypatch):
    """Or their staging slots would stay taken."""
    ended: list[LayerPush] = []
    monkeypatch.setattr(Sender, "_end_layer", lambda sender, push: ended.append(push))
    first, second = pushes(transfers)
    third = dataclasses.replace(second)
    second.ready = Failed()
    write(sender, first, second, third)
    assert [id(push) for push in ended] == [id(first), id(second), id(third)]
    assert all(transfer.state.failure is not None for transfer in transfers)


def test_an_idle_link_gets_a_layer_at_once_and_a_busy_one_those_that_have_come(transfers):
    calls = Calls()
    with sending(calls) as sender:
        layers = [*pushes(transfers), *pushes(transfers)]
        alone = pushes(transfers)[0]
        sender.put_layer(alone)
        assert calls.begun.acquire(timeout=10), "nothing else was put"
        for push in layers:
            sender.put_layer(push)
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
        first, second = pushes(transfers)[0], pushes(transfers)[0]
        first.ready = held = Held(Done())
        sender.put_layer(first)
        sender.put_layer(second)
        passed = sender.barrier()
        held.let_go()
        assert calls.begun.acquire(timeout=10)
        assert not calls.begun.acquire(timeout=0.05)
        calls.proceed.set()
        assert passed.wait(10)
        assert calls.calls == [destinations(0), destinations(0)]


def test_a_failed_write_may_still_deliver_kv_that_vllm_took_back(sender, transfers):
    for transfer in transfers:
        transfer.state.delay_settling(1.0)
    transfers[0].again = True
    sender.finish(transfers)
    assert sender.barrier().wait(10)
    sender.check()
    assert "took back" in str(transfers[0].state.failure)
    assert transfers[1].state.failure is None


def test_kv_of_weights_that_were_updated_meanwhile_is_not_delivered(sender, transfers):
    weights = sender._rank.loaded
    transfers[0].weights = weights.current
    with weights.changing("update_weights"):
        pass
    transfers[1].weights = weights.current
    sender.finish(transfers)
    assert sender.barrier().wait(10)
    sender.check()
    assert "weights were updated" in str(transfers[0].state.failure)
    assert transfers[1].state.failure is None


def test_a_request_that_has_failed_is_not_written(engine, sender, transfers):
    transfers[0].state.fail("its client has left", PushFailure.ABORTED)
    write(sender, *pushes(transfers))
    assert engine.arrived == [copy_of(layer, 3, 9) for layer in range(len(LAYERS))]


def test_layers_that_are_over_make_room_for_others(sender, transfers):
    write(sender, *pushes(transfers))
    assert sender._room.qsize() == ConnectorConfig().push_queue_size


def test_what_a_failed_forward_pass_has_not_computed_is_not_delivered(transfers):
    """tests/integration/test_failed_forward.py has vLLM's runner report it."""
    worker: Any = PrefillWorker.__new__(PrefillWorker)
    worker._plan = StepPlan(last=[transfers[0]])
    worker.end_forward(MemoryError("none left"))
    assert "forward pass failed: MemoryError('none left')" in str(transfers[0].state.failure)
    assert transfers[1].state.failure is None


def test_a_step_and_its_prompts_end_once(transfers):
    """However often vLLM's hooks say so."""
    ended: list[Any] = []

    class Ends(Observer):
        def finish(self, transfers: Sequence[Transfer]) -> None:
            ended.append(transfers)

        def on(self, event: Any) -> None:
            if isinstance(event, StepEnded):
                ended.append(event)

    worker: Any = PrefillWorker.__new__(PrefillWorker)
    worker._rank, worker._observer = SimpleNamespace(config=ConnectorConfig()), Ends()
    worker._device, worker._regrouper, worker._turns = SimpleNamespace(record_event=Done), None, None
    worker._caches_of, worker._cached = {}, None
    worker._caches = SimpleNamespace(layers_by_geometry={}, quantize={})
    [transfer] = transfers[:1]
    transfer.sender = worker._observer
    worker._plan = StepPlan(1, {0: plan(transfers)}, dict.fromkeys(LAYERS), last=[transfer], confirmed=[transfer])
    for layer in LAYERS:
        worker.push_layer(layer)
    worker.end_step()
    worker.end_step()
    assert ended == [[transfer], StepEnded(transfer.prompt_end)]


@pytest.mark.parametrize("settles_in_s", [-1.0, 60.0])
def test_preempted_blocks_are_not_sent_while_a_failed_write_may_read_them(sender, transfers, settles_in_s: float):
    """The write would read the blocks' next content, and deliver that (R3)."""
    worker: Any = PrefillWorker.__new__(PrefillWorker)
    worker._rank, worker._plan, worker._forward_ended = sender._rank, StepPlan(), True
    worker._turns, worker._observer = None, Observer()
    [transfer] = transfers[:1]
    transfer.sender = sender
    transfer.state.delay_settling(sender._rank.running_time() + settles_in_s)
    worker._transfers = {"a": transfer}
    worker.preempted(PrefillStep(preempted={"a"}))
    assert (transfer.state.failure is not None) == (settles_in_s > 0)


def test_a_slot_goes_back_once_whoever_fills_it_first(transfers):
    filled, given_up = pushes(transfers)
    slot = Slot(0, 1)
    assert filled.fill(slot)
    assert filled.take_staging_slot() is slot
    assert given_up.take_staging_slot() is None
    assert not given_up.fill(slot), "the side stream keeps it"


def test_blocks_are_freed_once_the_transfer_is_over_and_vllm_is_done_with_the_request(sender, transfers):
    worker: Any = PrefillWorker.__new__(PrefillWorker)
    worker._transfers, worker._done = dict(zip("ab", transfers, strict=True)), set()
    for transfer in transfers:
        transfer.sender = sender
    worker._take((transfers[0], True))
    worker._release("b", None)
    assert worker._done == set()
    worker._release("a", None)
    assert worker._done == {"a"}
    worker._take((transfers[1], True))
    assert worker._done == {"a", "b"}


def test_a_failure_that_one_rank_knows_of_leaves_no_request_out_of_its_plan(transfers):
    """All ranks must make the same plan, because they exchange heads for it (R5)."""
    planner: Any = Planner.__new__(Planner)
    planner._mappings, planner._geometries = SimpleNamespace(mapping=lambda *_: MAPPING), [GEOMETRY]
    planner._regrouper, planner._layers = None, [len(LAYERS)]
    planner._rank = SimpleNamespace(config=ConnectorConfig(), device=None)
    transfers[0].state.fail("a write has failed", PushFailure.WRITE)
    slices = [(each, Send("", 0, BLOCK, ([2 * n + 1],), last=False)) for n, each in enumerate(transfers)]
    [step_send] = planner._plan_geometry(StepPlan(), 0, transfers[0].ticket, slices)
    assert step_send.transfers == transfers
