# SPDX-License-Identifier: Apache-2.0
"""Lets a test reach into an engine's processes while they run: each listens at a Unix socket of its own, and calls
what the test asks for.

Writes fail at the transfer engine's own boundary, so all of the product is in play: it sees what Mooncake answers.
"""

import os
import threading
import time
import traceback
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from vllm_ascend_pd.transport import engine
from vllm_ascend_pd.transport.engine import TransferEngine

FAILED = -1

_session: str | None = None
_made_up_session = ""
_engines: "list[_Mooncake]" = []


class _Mooncake:
    """A Mooncake engine whose next `times` batches fail in the way `fault` names (None: all of them)."""

    def __init__(self, mooncake: Any) -> None:
        self._mooncake = mooncake
        self._lock = threading.Lock()
        self.fault = ""
        self.times: int | None = 0
        self.seconds = 0.0
        self.batches = 0
        self.faults = 0
        """Batches since `fault` was set that went as it says."""
        self._ids = 0
        self._codes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mooncake, name)

    def batch_transfer_async_write(self, *batch: Any) -> int:
        with self._lock:
            self._ids += 1
            batch_id = self._ids
        self._codes[batch_id] = self.batch_transfer_sync_write(*batch)
        return batch_id

    def get_batch_transfer_status(self, batch_ids: list[int]) -> int:
        [batch_id] = batch_ids
        return self._codes.pop(batch_id)

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], destinations: list[int], lengths: list[int]
    ) -> int:
        with self._lock:
            self.batches += 1
            fault = self.fault if self.times is None or self.times > 0 else ""
            if fault and self.times is not None:
                self.times -= 1
            self.faults += bool(fault)

        def write() -> int:
            return int(self._mooncake.batch_transfer_sync_write(session, sources, destinations, lengths))

        if fault == "slow":
            time.sleep(self.seconds)
            return write()
        if fault == "fail":
            return FAILED
        if fault == "fail-after":  # all bytes have arrived
            write()
            return FAILED
        if fault == "fail-before":  # all bytes arrive a while later
            threading.Timer(self.seconds, write).start()
            return FAILED
        if fault == "hang":
            time.sleep(self.seconds)
            return FAILED
        return write()


def listen(folder: Path, session: str, refuse_memory: bool) -> None:
    """Before the connector is made. `session`: what to publish instead of the transfer engine's own; "": that."""
    global _made_up_session
    _made_up_session = session
    init, start = TransferEngine.__init__, engine._start

    def start_wrapped(host: str, protocol: str) -> _Mooncake:
        mooncake = _Mooncake(start(host, protocol))
        _engines.append(mooncake)
        if refuse_memory:
            mooncake.batch_register_memory = lambda *_: FAILED
        return mooncake

    def init_and_publish(self: TransferEngine, *args: Any, **kwargs: Any) -> None:
        global _session
        init(self, *args, **kwargs)
        _session = self.session
        self.session = session or self.session

    engine._start = start_wrapped
    TransferEngine.__init__ = init_and_publish  # type: ignore[method-assign]
    _start(folder)
    os.register_at_fork(after_in_child=lambda: _start(folder))


def _start(folder: Path) -> None:
    threading.Thread(target=_serve, args=(folder / f"{os.getpid()}.sock",), name="remote-control", daemon=True).start()


def _serve(path: Path) -> None:
    with Listener(str(path), "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                try:
                    name, args = connection.recv()
                    connection.send((True, COMMANDS[name](*args)))
                except EOFError:
                    continue
                except Exception:  # noqa: BLE001 - raised in the test
                    connection.send((False, traceback.format_exc()))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def _own_session() -> str | None:
    """Returns the real session of this process's transfer engine, if it has one."""
    return _session


def _set_writes(fault: str, times: int | None, seconds: float) -> int:
    """Returns how many batches went as was set before."""
    before = sum(each.faults for each in _engines)
    for each in _engines:
        each.fault, each.times, each.seconds, each.faults = fault, times, seconds, 0
    return before


def _batches() -> int:
    """Returns the number of batches written so far."""
    return sum(each.batches for each in _engines)


COMMANDS = {"threads": _threads, "session": _own_session, "set_writes": _set_writes, "batches": _batches}
