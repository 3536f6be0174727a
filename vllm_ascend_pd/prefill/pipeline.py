# SPDX-License-Identifier: Apache-2.0
"""Writes to one decode engine, in order, the next one begun before the last one has ended."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, Flight, TransferError

logger = logging.getLogger(__name__)

Done: TypeAlias = Callable[[TransferError | None], None]

_NOTHING: Batch = ((), (), [])


class _Entry(NamedTuple):
    """A step that runs when all steps before it are done."""

    # Whether `do` waits for a batch in flight. Otherwise it only runs a callback.
    is_flight: bool
    do: Callable[[], None]


class Pipeline:
    """Writes to one decode engine, in order, with at most `BATCHES_IN_FLIGHT` batches in flight.

    The next write begins before the last one has ended, so that the link does not idle.

    One thread calls it. Every call may block for as long as a batch may take (`TransferEngine`).
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        # The first entry, if there is one, is a flight. Callbacks behind it run as soon as it has ended.
        self._entries: deque[_Entry] = deque()
        # How many of the entries are flights.
        self._flights = 0

    @owned
    def write(self, session: str, batches: Iterable[Batch], may_begin: Callable[[], bool], done: Done) -> None:
        """Begins all `batches` (`TransferEngine.begin`), unless one fails.

        Calls `done` once none of them is in flight, with None or an error. Of several errors it gets the first one
        after which bytes may still arrive, or else the first one.
        """
        errors: list[TransferError] = []

        def call_done() -> None:
            done(next((e for e in errors if e.may_arrive), errors[0]) if errors else None)

        try:
            for batch in batches:
                # Release our own room before blocking for more, or two senders to one peer deadlock.
                self.await_turn(session, batch)
                if errors:
                    break
                try:
                    flight = self._engine.begin(session, batch, may_begin)
                except Exception as error:  # noqa: BLE001 - as in `_land`
                    errors.append(_failure(session, error))
                    break
                if flight is not None:
                    self._flights += 1
                    self._entries.append(_Entry(True, partial(self._land, flight, errors)))
        except Exception as error:
            # A callback of an earlier write raised it. This write's batches in flight must still be waited for.
            errors.append(_failure(session, error))
            self._entries.append(_Entry(False, call_done))
            raise
        self.then(call_done)

    @owned
    def then(self, call: Callable[[], None]) -> None:
        """Calls `call` once all writes before it are over."""
        if self._entries:
            self._entries.append(_Entry(False, call))  # the first one is a flight
        else:
            call()

    @owned
    def await_turn(self, session: str, batch: Batch = _NOTHING) -> None:
        """Waits until a batch to `session` may begin at once, but not for writes of others."""
        while self._flights >= BATCHES_IN_FLIGHT or (self._flights and not self._engine.has_room(session, batch)):
            self._end_first()

    @owned
    def drain(self) -> None:
        """Waits for all writes."""
        while self._entries:
            self._end_first()

    def _end_first(self) -> None:
        """Ends the first flight, and runs the callbacks that no flight holds up any more."""
        self._entries.popleft().do()
        while self._entries and not self._entries[0].is_flight:
            self._entries.popleft().do()

    def _land(self, flight: Flight, errors: list[TransferError]) -> None:
        self._flights -= 1
        try:
            flight.wait()
        except Exception as error:  # noqa: BLE001 - `done` gets it
            errors.append(_failure(flight.session, error))


def _failure(session: str, error: Exception) -> TransferError:
    """Returns `error` as a TransferError. An unexpected error may have left bytes in flight."""
    if isinstance(error, TransferError):
        return error
    logger.error("a write to %s failed", session, exc_info=error)
    return TransferError(session, repr(error), retryable=False, may_arrive=True)
