# SPDX-License-Identifier: Apache-2.0
"""An error at any call on a layer's way to decode keeps no place in a peer's queue, no slot and no room.

The way is the real one, from the side stream to the transfer engine. Only Mooncake is a fake. The layers are written
again and again, and each time another call raises.
"""

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias
from unittest.mock import Mock

import msgspec
import pytest
import torch
from test_sender import BLOCK_BYTES, LAYERS, RANK, THEIRS, Held, make_transfer, plan, staged_mapping

import vllm_ascend_pd
from harness.waiting import wait_for
from vllm_ascend_pd.core import threads
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import CacheTensor
from vllm_ascend_pd.core.protocol import EngineDescription, TransportInfo
from vllm_ascend_pd.decode.ticket_client import TicketClient
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.prefill import sender as sender_module
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import Regrouper, StagingRing
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_send import LayerPush
from vllm_ascend_pd.transport import ascend, mooncake_library
from vllm_ascend_pd.transport import engine as engine_module
from vllm_ascend_pd.transport.ascend_writer import AscendWriter
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.tcp import TcpWriter
from vllm_ascend_pd.transport.writer import TransferError

SLOTS = 3
# Longer than anything settles.
HOURS = 1e6
FILES = {__file__, *map(str, Path(vllm_ascend_pd.__file__).parent.rglob("*.py"))} - {threads.__file__}
PEER = msgspec.structs.replace(RANK, session="127.0.0.1:2")
LAYOUT = DecodeLayout(EngineDescription("decode", "model", 1, 1, (PEER,)))

# Functions that give back, and those whose own bodies handle every error.
GIVE_BACK = {
    *("PeerQueue.leave", "Reach.failed", "Slots.give_back", "Slots.give_back_after", "Slots.forget"),
    *(f"_TcpFlight.{name}" for name in ("wait", "land", "lost", "give_up")),
    *(f"_AscendFlight.{name}" for name in ("wait", "lost", "give_up")),
    *("StagingRing.release", "StagingRing.free_rested", "LayerPush.take_staging_slot", "LayerPush.fill"),
    *("TransferError.__init__", "_failure", "_fail", "StepSend.fail", "PrefillTicket.fail", "DeviceError.__init__"),
    *(f"Sender.{name}" for name in ("_run", "_take", "_write_layers", "_drain", "_settle_oldest", "_end_what_is_over")),
    *(f"Sender.{name}" for name in ("_end_write", "_end_layer", "_reach")),
    *("CpuDevice._run", "CpuEvent.set"),
}


Place: TypeAlias = tuple[str, str, int]
"""A call: the function, and the function and line that it is called from."""


class Fault:
    """A profile function. On one thread it notes all calls of this package's functions and of Mooncake's, or raises at
    the first call at one place."""

    def __init__(self, thread: str, place: Place | None = None, error: type[BaseException] = RuntimeError) -> None:
        self._thread, self._place, self._error = thread, place, error
        self.seen: dict[Place, None] = {}
        self.has_raised = self.is_over = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if self.is_over or event != "call" or caller is None or threading.current_thread().name != self._thread:
            return
        if code.co_filename not in FILES or code.co_name.startswith("<") or code.co_qualname in GIVE_BACK:
            return
        place = code.co_qualname, caller.f_code.co_qualname, caller.f_lineno
        self.seen[place] = None
        if place == self._place and not self.has_raised:
            self.has_raised = True
            raise self._error("a bug")


class Mooncake:
    """An engine whose batches arrive at once, but for those whose numbers are `lost` or `not_taken`."""

    def __init__(self) -> None:
        self.start_afresh(set(), set())

    def start_afresh(self, lost: Set[int], not_taken: Set[int]) -> None:
        self.arrived: set[int] = set()
        self._lost, self._not_taken = lost, not_taken
        self._number = itertools.count(1)

    def initialize(self, *arguments: Any) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def send_probe(self, session: str) -> int:
        return 0

    def batch_transfer_async_write(self, session: str, sources: Any, destinations: Any, lengths: Any) -> int:
        number = next(self._number)
        if number in self._not_taken:
            return 0
        if number not in self._lost:
            self.arrived.update(destinations)
        return number

    def batch_transfer_sync_write(self, session: str, sources: Any, destinations: Any, lengths: Any) -> int:
        self.arrived.update(destinations)
        return 0

    def get_batch_transfer_status(self, numbers: Sequence[int]) -> int:
        return -1 if self._lost & set(numbers) else 0

    def transfer_check_status(self, number: int) -> int:
        return -1 if number in self._lost else 1


@pytest.fixture(params=["tcp", "ascend"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(mooncake_library, "load", lambda: Mooncake)
    monkeypatch.setattr(mooncake_library, "check_protocol", lambda *arguments: None)
    monkeypatch.setattr(ascend, "check", lambda: None)
    monkeypatch.setattr(ascend, "is_loaded", lambda maps: True)
    monkeypatch.setattr(ascend, "chip_name", lambda: None)
    monkeypatch.setattr(engine_module, "describe_transport", lambda protocol: TransportInfo(protocol))
    monkeypatch.setattr(sender_module, "_RETRY_PAUSE_S", 0.0)
    return str(request.param)


@pytest.fixture
def engine(protocol: str) -> TransferEngine:
    made = TransferEngine("127.0.0.1", protocol, TransferLimits(timeout_s=1.0))
    writer: Any = made._writer
    writer._limits = dataclasses.replace(writer._limits, timeout_s=0.01)  # what a batch waits for room
    return made


def expect_no_place_taken(engine: TransferEngine) -> None:
    """Of batches to peers, once failed ones have settled."""
    writer = engine._writer
    if isinstance(writer, TcpWriter):
        assert all(queue._batches == queue._descriptors == 0 for queue in writer._queues.values())
    else:
        assert isinstance(writer, AscendWriter)
        writer._slots._until = dict.fromkeys(writer._slots._until, 0.0)
        assert writer._slots.is_free(PEER.session)
        assert not writer._slots._held


def test_a_batch_without_bytes_is_refused(engine: TransferEngine) -> None:
    for batch in [([], [], []), ([1], [1], [0])]:
        with pytest.raises(ValueError, match="without bytes"):
            engine.begin(PEER.session, batch, lambda: True)
    expect_no_place_taken(engine)


def test_messages_that_do_not_start_or_fail_keep_no_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    client = TicketClient("client")
    with monkeypatch.context() as patch:
        patch.setattr(client._thread, "start", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            client._tell(fail)
    client._tell(fail)
    wait_for(lambda: client._messages, lambda messages: messages == 0, 10, every_s=0.0005)
    client.close()


class Way:
    """A layer's way to decode, with threads of its own, whose profile function is `fault`."""

    def __init__(self, engine: TransferEngine, fault: Fault) -> None:
        self.engine, self.fault = engine, fault
        # Running time, which the test moves.
        self.now = 0.0
        unused: Any = None
        running: Any = lambda: self.now  # noqa: E731 - it stands for an object
        threading.setprofile(fault)
        try:
            self.device = CpuDevice()
            rank = PrefillRank(unused, ConnectorConfig(), self.device, engine, unused, running_time=running)
            buffer = torch.zeros(SLOTS * 2 * BLOCK_BYTES, dtype=torch.uint8)
            self.ring = StagingRing(buffer, 2 * BLOCK_BYTES, SLOTS, running)
            self.regrouper = Regrouper(rank, self.ring, {})
            self.sender = Sender("sender", rank, self.ring, lambda transfers: None)
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
        self.sender.engine_described(LAYOUT)
        self.rooms = self.sender._room.qsize()

    def write(self, lost: Set[int] = frozenset(), not_taken: Set[int] = frozenset()) -> list[str | None]:
        """Sends both layers of two requests. The first one waits for a staging slot. They leave together, since both
        are regrouped before the first write begins.

        Returns how each request ended: None for success, whose bytes have arrived then.
        """
        mooncake = self.engine._engine
        mooncake.start_afresh(lost, not_taken)
        transfers = [make_transfer("a", 7), make_transfer("b", 9)]
        [step_send] = plan(transfers, staged_mapping(), slot_units=2)
        cache = torch.zeros(100 * BLOCK_BYTES, dtype=torch.uint8)
        pushes, others = [], [self.ring.take(step_send) for _ in range(SLOTS)]
        for layer in LAYERS:
            tensors = [CacheTensor(layer, 0, cache.data_ptr(), 100, 0)]
            push = LayerPush(layer, step_send, tensors, self.device.record_event(), self.device.record_event())
            push.over = threading.Event()
            assert self.regrouper.submit(push, [cache])
            if not pushes:
                push.ready = first = Held(push.ready)
            pushes.append(push)
            self.sender.put_layer(push)
        ring: Any = self.ring
        wait_for(lambda: ring._changed._waiters or self.fault.has_raised, bool, 10, every_s=0.0005)
        for slot in others:
            assert slot is not None
            self.ring.release(slot)
        with suppress(DeviceError):
            pushes[-1].ready.wait(10)
        self.sender.finish(transfers)
        passed = self.sender.barrier()
        first.let_go()
        passed.wait(10)
        self.sender.check()
        assert all(push.over is not None and push.over.is_set() for push in pushes)
        for transfer in transfers:
            [[block]] = transfer.ticket.remote_block_ids
            if transfer.state.failure is None:
                assert mooncake.arrived >= {tensor.base + block * BLOCK_BYTES for tensor in THEIRS}
        return [transfer.state.failure for transfer in transfers]

    def expect_nothing_kept(self) -> None:
        self.now += HOURS
        self.ring.free_rested()
        assert (self.ring.holders, len(self.ring._free)) == ([], SLOTS)
        assert self.sender._room.qsize() == self.rooms
        expect_no_place_taken(self.engine)

    def close(self) -> None:
        self.sender.close(10)
        self.device.close()


# The first batch is lost, so requests are written apart. Of the third one Mooncake takes nothing, so it is tried again.
LEAST = {"sender": 70, "cpu-side-stream": 12, "MainThread": 10}
ODDS: dict[str, Any] = {"lost": {1}, "not_taken": {3}}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # when a generator is closed
@pytest.mark.parametrize("thread", ["sender", "cpu-side-stream"])
def test_whatever_call_raises(engine: TransferEngine, thread: str) -> None:
    def run(fault: Fault) -> None:
        way = Way(engine, fault)
        try:
            way.write(**ODDS)
            fault.is_over = True
            way.expect_nothing_kept()
            assert way.write() == [None, None]
            way.expect_nothing_kept()
        finally:
            way.close()
            engine.forget([PEER.session])

    calls = Fault(thread)
    run(calls)
    raised = 0
    for place in calls.seen:
        fault = Fault(thread, place)
        try:
            run(fault)
        except BaseException as error:
            raise AssertionError(f"after an error at {place}") from error
        raised += fault.has_raised
    assert raised >= LEAST[thread]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whatever_call_is_interrupted(engine: TransferEngine) -> None:
    def run(fault: Fault) -> None:
        engine._engine.start_afresh(set(), {3})
        sys.setprofile(fault)
        try:
            for _ in range(3):
                with suppress(KeyboardInterrupt, TransferError):
                    engine.write(PEER.session, [1], [1], [1])
        finally:
            sys.setprofile(None)
        expect_no_place_taken(engine)
        engine.forget([PEER.session])

    calls = Fault("MainThread")
    run(calls)
    raised = 0
    for place in calls.seen:
        fault = Fault("MainThread", place, KeyboardInterrupt)
        run(fault)
        raised += fault.has_raised
    assert raised >= LEAST["MainThread"]
