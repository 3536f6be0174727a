# SPDX-License-Identifier: Apache-2.0
"""Writes in order, the next one begun before the last one has ended."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_ascend_pd.prefill.pipeline import Pipeline
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, TransferError


class Engine:
    """A transfer engine's `begin`, whose batches are names; those in `refused` do not begin, those in `lost` fail, all
    at once where they are `immediate`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.under_way: set[Any] = set()
        self.most = 0
        self.refused: set[Any] = set()
        self.lost: set[Any] = set()
        self.full = False  # of others' batches
        self.immediate = False
        self.broken: set[Any] = set()
        self.unexpected: set[Any] = set()

    def has_room(self, session: str, batch: Any) -> bool:
        return not self.full

    def begin(self, session: str, batch: Any, may_begin: Callable[[], bool]) -> "Flight | None":
        if batch in self.refused or not may_begin():
            raise TransferError(session, f"{batch} is refused", retryable=False)
        if batch in self.unexpected:
            raise RuntimeError(f"{batch} meets a defect")
        self.log.append(f"begin {batch}")
        self.under_way.add(batch)
        self.most = max(self.most, len(self.under_way))
        flight = Flight(self, session, batch)
        if not self.immediate:
            return flight
        flight.wait()
        return None


class Flight:
    def __init__(self, engine: Engine, session: str, batch: Any) -> None:
        self.engine, self.session, self.batch = engine, session, batch

    def wait(self) -> None:
        self.engine.under_way.remove(self.batch)
        if self.batch in self.engine.broken:
            raise ValueError(f"{self.batch} meets a defect")
        if self.batch in self.engine.lost:
            raise TransferError(self.session, f"{self.batch} is lost", retryable=True, may_arrive=True)
        self.engine.log.append(f"arrived {self.batch}")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def pipeline(engine) -> Pipeline:
    return Pipeline(engine)


def write(pipeline: Pipeline, engine: Engine, *batches: str, may_begin: Callable[[], bool] = lambda: True) -> None:
    def done(error: TransferError | None) -> None:
        assert not engine.under_way & set(batches)
        engine.log.append(f"done {batches[0][0]}: {error.reason if error else 'well'}")

    pipeline.write("peer", batches, may_begin, done)


def test_never_more_under_way_than_the_queue_to_a_peer_takes(engine, pipeline):
    write(pipeline, engine, "a1", "a2", "a3", "a4", "a5")
    write(pipeline, engine, "b1", "b2", "b3")
    pipeline.drain()
    assert engine.most == BATCHES_IN_FLIGHT
    assert [line for line in engine.log if line.startswith("done")] == ["done a: well", "done b: well"]


def test_nothing_is_under_way_while_it_waits_for_room_that_others_take(engine, pipeline):
    write(pipeline, engine, "a1")
    engine.full = True
    write(pipeline, engine, "b1")
    assert engine.log == ["begin a1", "arrived a1", "done a: well", "begin b1"]


def test_what_is_to_follow_waits_for_the_writes_before_it(engine, pipeline):
    pipeline.then(lambda: engine.log.append("at once"))
    write(pipeline, engine, "a1")
    pipeline.then(lambda: engine.log.append("finished"))
    write(pipeline, engine, "b1")
    assert engine.log == ["at once", "begin a1", "begin b1"]
    pipeline.drain()
    assert engine.log[3:] == ["arrived a1", "done a: well", "finished", "arrived b1", "done b: well"]


def test_after_a_failure_the_rest_of_a_write_is_not_begun_but_others_are(engine, pipeline):
    engine.lost = {"a1"}
    write(pipeline, engine, "a1", "a2", "a3", "a4")
    write(pipeline, engine, "b1")
    pipeline.drain()
    assert "begin a3" not in engine.log
    assert [line for line in engine.log if line.startswith("done")] == ["done a: a1 is lost", "done b: well"]


def test_of_several_failures_one_is_told_after_which_bytes_may_still_arrive(engine, pipeline):
    engine.refused, engine.lost = {"a2"}, {"a1"}
    write(pipeline, engine, "a1", "a2", "a3")
    assert engine.log == ["begin a1"], "nothing is told while a batch is under way"
    pipeline.drain()
    assert engine.log == ["begin a1", "done a: a1 is lost"]


def test_leave_is_asked_for_every_batch(engine, pipeline):
    leave = iter([True, True, False])
    write(pipeline, engine, "a1", "a2", "a3", may_begin=lambda: next(leave))
    pipeline.drain()
    assert engine.log == ["begin a1", "begin a2", "arrived a1", "arrived a2", "done a: a3 is refused"]


def test_an_error_that_nobody_expects_is_no_success(engine, pipeline):
    engine.broken = {"a1"}
    write(pipeline, engine, "a1")
    pipeline.drain()
    assert engine.log == ["begin a1", "done a: ValueError('a1 meets a defect')"]


def test_an_error_that_nobody_expects_at_a_beginning_waits_for_what_is_under_way(engine, pipeline):
    engine.unexpected, engine.lost = {"a2"}, {"a1"}
    write(pipeline, engine, "a1", "a2", "a3")
    assert engine.log == ["begin a1"]
    pipeline.drain()
    assert engine.log == ["begin a1", "done a: RuntimeError('a2 meets a defect')"]
    engine.log.clear()
    engine.lost.clear()
    write(pipeline, engine, "b1")
    write(pipeline, engine, "a2")
    pipeline.drain()
    assert engine.log == ["begin b1", "arrived b1", "done b: well", "done a: RuntimeError('a2 meets a defect')"]


def test_an_error_of_whoever_is_told_is_no_writes(engine, pipeline):
    """It is nobody's whose write is begun meanwhile: the sender ends with it."""

    def told() -> None:
        raise AssertionError("a defect of the transfer before")

    write(pipeline, engine, "a1", "a2")
    pipeline.then(told)
    with pytest.raises(AssertionError, match="of the transfer before"):
        write(pipeline, engine, "b1", "b2")
    assert not any(line.startswith("done b") for line in engine.log)


def test_an_error_between_two_batches_does_not_hide_how_the_first_ends(engine, pipeline):
    """Its bytes may still arrive: whoever owns the write has to know."""
    engine.lost = {"a1"}

    def cut() -> Iterator[str]:
        yield "a1"
        raise MemoryError

    told: list[TransferError | None] = []
    with pytest.raises(MemoryError):
        pipeline.write("peer", cut(), lambda: True, told.append)
    assert told == []
    pipeline.drain()
    [error] = told
    assert error is not None
    assert error.may_arrive
