# SPDX-License-Identifier: Apache-2.0
"""A sender's writes end in order, and the next one begins before the last one has ended."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_sender import BLOCK_BYTES, LAYERS, OURS, THEIRS, Done, Held, make_transfer, plan, sending

from vllm_ascend_pd.prefill import sender as sender_module
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_send import LayerPush
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, TransferError

# A batch has one request, whose block at decode says its name.
NAMES = [f"{layer}{number}" for layer in "abc" for number in range(1, 6)]
BLOCKS = {name: block for block, name in enumerate(NAMES, 1)}


class Engine:
    """A transfer engine whose batches are known by their names. Those in `refused` do not begin, those in `lost` fail.
    `broken` and `unexpected` ones meet a defect: when they end, and when they begin."""

    limits = TransferLimits(connections=1, max_descriptors=1)

    def __init__(self) -> None:
        self.log: list[str] = []
        self.in_flight: set[str] = set()
        self.most = 0
        self.refused: set[str] = set()
        self.lost: set[str] = set()
        self.broken: set[str] = set()
        self.unexpected: set[str] = set()
        self.full = False  # of others' batches
        # Is called before a batch begins.
        self.before: Callable[[str], None] = lambda name: None

    def has_room(self, session: str, batch: Any) -> bool:
        return not self.full

    def begin(self, session: str, batch: Any, may_begin: Callable[[], bool]) -> "Flight":
        name = NAMES[(batch[1][0] - THEIRS[0].base) // BLOCK_BYTES - 1]
        self.before(name)
        if name in self.refused or not may_begin():
            raise TransferError(session, f"{name} is refused", retryable=False)
        if name in self.unexpected:
            raise RuntimeError(f"{name} meets a defect")
        self.log.append(f"begin {name}")
        self.in_flight.add(name)
        self.most = max(self.most, len(self.in_flight))
        return Flight(self, name)


class Flight:
    session = "peer"

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    def wait(self) -> None:
        self.engine.in_flight.remove(self.name)
        if self.name in self.engine.broken:
            raise ValueError(f"{self.name} meets a defect")
        if self.name in self.engine.lost:
            raise TransferError(self.session, f"{self.name} is lost", retryable=True, may_arrive=True)
        self.engine.log.append(f"arrived {self.name}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """It notes how each write has ended. Requests of a failed one are not written again."""
    engine, end_write = Engine(), Sender._end_write

    def ended(sender: Sender, write: Any) -> None:
        names = {
            NAMES[block - 1] for [[block]] in (t.ticket.remote_block_ids for t in write.layers[0].step_send.transfers)
        }
        assert not engine.in_flight & names
        engine.log.append(f"done {min(names)[0]}: {write.error.reason if write.errors else 'well'}")
        end_write(sender, write)

    monkeypatch.setattr(Sender, "_end_write", ended)
    monkeypatch.setattr(Sender, "_write_apart", lambda sender, layer, target, write: [])
    return engine


def layer(*names: str) -> LayerPush:
    """A layer with a batch for each of these."""
    [step_send] = plan([make_transfer(name[0], BLOCKS[name]) for name in names])
    step_send.is_located = True
    return LayerPush(LAYERS[0], step_send, [OURS[0]], Done(), Done())


def write(engine: Engine, *layers: LayerPush, finish_after: int | None = None) -> list[str]:
    """Writes layers that all come before the first one can be read. Returns the engine's log."""
    first, engine.log = Held(Done()), []
    layers[0].ready = first
    with sending(engine, on_writing_ended=lambda transfers: engine.log.append("finished")) as sender:
        for number, each in enumerate(layers):
            sender.put_layer(each)
            if number == finish_after:
                sender.finish(each.step_send.transfers)
        passed = sender.barrier()
        first.let_go()
        assert passed.wait(10)
        sender.check()
    return engine.log


def ends(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("done")]


def test_never_more_in_flight_than_the_queue_to_a_peer_takes(engine: Engine) -> None:
    log = write(engine, layer("a1", "a2", "a3", "a4", "a5"), layer("b1", "b2", "b3"))
    assert engine.most == BATCHES_IN_FLIGHT
    assert ends(log) == ["done a: well", "done b: well"]


def test_nothing_is_in_flight_while_it_waits_for_room_that_others_take(engine: Engine) -> None:
    engine.full = True
    log = write(engine, layer("a1", "a2"), layer("b1"))
    of_a = ["begin a1", "arrived a1", "begin a2", "arrived a2", "done a: well"]
    assert log == [*of_a, "begin b1", "arrived b1", "done b: well"]


def test_a_mark_waits_for_the_writes_before_it(engine: Engine) -> None:
    log = write(engine, layer("a1"), layer("b1"), finish_after=0)
    assert log == ["begin a1", "begin b1", "arrived a1", "done a: well", "finished", "arrived b1", "done b: well"]


def test_after_a_failure_the_rest_of_a_write_is_not_begun_but_others_are(engine: Engine) -> None:
    engine.lost = {"a1"}
    log = write(engine, layer("a1", "a2", "a3", "a4"), layer("b1"))
    assert "begin a3" not in log
    assert ends(log) == ["done a: a1 is lost", "done b: well"]


def test_of_several_failures_one_counts_after_which_bytes_may_still_arrive(engine: Engine) -> None:
    engine.refused, engine.lost = {"a2"}, {"a1"}
    assert write(engine, layer("a1", "a2", "a3")) == ["begin a1", "done a: a1 is lost"]


def test_the_lease_is_checked_before_every_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(sender_module, "time", clock)

    def lease_ends_before(name: str) -> None:
        if name == "a3":
            clock.monotonic = lambda: time.monotonic() + 1000.0

    engine.before = lease_ends_before
    log = write(engine, layer("a1", "a2", "a3"))
    assert log == ["begin a1", "begin a2", "arrived a1", "arrived a2", "done a: a3 is refused"]


def test_an_error_that_nobody_expects_is_no_success(engine: Engine) -> None:
    engine.broken = {"a1"}
    assert write(engine, layer("a1")) == ["begin a1", "done a: ValueError('a1 meets a defect')"]


def test_an_error_that_nobody_expects_at_a_beginning_waits_for_what_is_in_flight(engine: Engine) -> None:
    engine.unexpected = {"a2"}
    log = write(engine, layer("b1"), layer("a2"))
    assert log == ["begin b1", "arrived b1", "done b: well", "done a: RuntimeError('a2 meets a defect')"]


def test_an_error_between_two_batches_does_not_hide_how_the_first_ends(engine: Engine, monkeypatch) -> None:
    """Its bytes may still arrive: whoever owns the write has to know."""
    engine.lost = {"a1"}

    def fails(session: str, batch: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr(engine, "has_room", fails)
    assert write(engine, layer("a1", "a2")) == ["begin a1", "done a: MemoryError()"]
