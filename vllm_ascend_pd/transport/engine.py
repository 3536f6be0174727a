# SPDX-License-Identifier: Apache-2.0
"""The Mooncake transfer engine: one-sided writes from local memory into a peer's registered memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.core.regions import Region
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.transport import ascend, mooncake_library
from vllm_ascend_pd.transport.ascend_writer import AscendWriter
from vllm_ascend_pd.transport.batches import Batch, Batches
from vllm_ascend_pd.transport.environment import export_settings, limits_over_ascend
from vllm_ascend_pd.transport.existing_engine import ExistingEngine
from vllm_ascend_pd.transport.hixl_engine import describe_transport
from vllm_ascend_pd.transport.limits import SettingError, TransferLimits
from vllm_ascend_pd.transport.reach import Reach
from vllm_ascend_pd.transport.registered_memory import RegisteredMemory, RegistrationError
from vllm_ascend_pd.transport.slots import Slots
from vllm_ascend_pd.transport.writer import Flight, TransferError, Writer

logger = logging.getLogger(__name__)


class TransferEngine:
    """One Mooncake engine: it registers memory of this process, and writes to memory of peers. Any thread may write.

    Before the first write to a peer, and after each failed one, the peer must answer a probe within `limits.timeout_s`
    (`reach.py`). How a write waits and ends depends on the protocol: `AscendWriter` for "ascend", `TcpWriter` for
    "tcp" and "rdma".
    """

    def __init__(
        self, host: str, protocol: str, limits: TransferLimits, existing: ExistingEngine | None = None
    ) -> None:
        """Start an engine that listens on `host`. `protocol`: "tcp", "rdma" or "ascend".

        `existing`: the Mooncake engine of other connectors in this process, for "ascend" only.

        Settings that the environment already holds win over those of `limits`. For "ascend", set the device first.
        Raises TransferError if the engine cannot start.
        """
        problems = ascend.check() if protocol == "ascend" else []
        if fatal := [problem.message for problem in problems if problem.fatal]:
            raise TransferError(host, "; ".join(fatal), retryable=False)
        if existing is not None:
            existing.export_settings()
        try:
            self._limits = export_settings(limits, protocol, host)
        except SettingError as error:
            raise TransferError(host, str(error), retryable=False) from None
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._engine: Any = _start(host, protocol) if existing is None else existing.start(host)
        except mooncake_library.LibraryError as error:
            raise TransferError(host, str(error), retryable=False) from error
        except RuntimeError as error:
            reason = str(error)
            if protocol == "ascend":
                reason += f": {ascend.why_not_started(problems, os.environ)}"
            raise TransferError(host, reason, retryable=False) from error
        if protocol == "ascend" and not ascend.is_loaded(Path("/proc/self/maps").read_text()):
            reason = f"this Mooncake has no Ascend transport and would use TCP: {ascend.INSTALL}"
            raise TransferError(host, reason, retryable=False)
        for problem in problems:
            logger.warning("%s", problem.message)
        self._session = authority(host, self._engine.get_rpc_port())
        self._transport = describe_transport(protocol)
        chip = ascend.chip_name() if protocol == "ascend" else None
        self._memory = RegisteredMemory(self._engine, chip, existing)
        self._reach = Reach(self._engine, self._session, self._limits.timeout_s)
        self._writer = self._make_writer(protocol)

    def _make_writer(self, protocol: str) -> Writer:
        if protocol != "ascend":
            # Only here: the Ascend path imports nothing of TCP's queue bound and pacing.
            from vllm_ascend_pd.transport.tcp_settings import queue_capacity
            from vllm_ascend_pd.transport.tcp_writer import TcpWriter

            return TcpWriter(self._engine, self._reach, self._limits, queue_capacity())
        try:
            self._limits = limits_over_ascend(self._limits, self._transport)
        except SettingError as error:
            raise TransferError(self._session, str(error), retryable=False) from None
        slots = Slots(*ascend.slots(os.environ, ascend.connects_one_by_one(self._transport)))
        return AscendWriter(self._engine, self._reach, self._limits, slots)

    @property
    def transport(self) -> TransportInfo:
        """How this engine moves bytes. Peers compare it with theirs."""
        return self._transport

    @property
    def session(self) -> str:
        """The address of this engine for peers: "host:rpc_port", an IPv6 host in brackets."""
        return self._session

    @property
    def limits(self) -> TransferLimits:
        """The limits in effect, which settings in the environment may have changed."""
        return self._limits

    def register(self, regions: Sequence[Region], of_caches: bool = False) -> None:
        """Register `regions`, so that peers can write to them and `write` can read them. All or none.

        Call it before peers learn of the addresses. Overlapping regions become one. Regions that are registered
        already are skipped. `of_caches`: they are the KV caches, which other connectors of this process register, too.

        Raises TransferError for regions that overlap registered ones in part, that protocol "ascend" does not allow,
        or that Mooncake refuses.
        """
        self._check_open()
        try:
            self._memory.add(regions, of_caches)
        except RegistrationError as error:
            raise TransferError(self._session, str(error), retryable=False) from None

    def write(self, session: str, sources: list[int], destinations: list[int], lengths: list[int]) -> None:
        """Copy `lengths[i]` bytes from `sources[i]` here to `destinations[i]` in the memory of `session`: see
        `write_batches`."""
        if not len(sources) == len(destinations) == len(lengths):
            raise ValueError(f"{len(sources)} sources, {len(destinations)} destinations, {len(lengths)} lengths")
        copies = Descriptors(*(np.array(column, dtype=np.int64) for column in (sources, destinations, lengths)))
        self.write_batches(session, Batches.cut([copies], self._limits).at([0], [0]))

    def write_batches(
        self, session: str, batches: Iterable[Batch], may_begin: Callable[[], bool] = lambda: True
    ) -> None:
        """Write `batches` to the memory of `session`, in order. They must have been cut to `limits`.

        Blocks until the receiver has every byte. The order of arrival is undefined. Writing again is safe: the same
        bytes go to the same place.

        `may_begin` is called right before each batch, after all waiting for the peer. If it returns False, the write
        ends with TransferError. No byte of a batch arrives later than `limits.settle_s` after the call.

        Raises TransferError as soon as one batch has failed. Later batches are not sent. If the error's `may_arrive`
        is set, source memory must stay unchanged for `limits.settle_s` more seconds.
        """
        for batch in batches:
            if (flight := self.begin(session, batch, may_begin)) is not None:
                flight.wait()

    def has_room(self, session: str, batch: Batch) -> bool:
        """See `Writer.has_room`."""
        return self._writer.has_room(session, batch)

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> Flight | None:
        """Start to write one batch: see `Writer.begin`."""
        self._check_open()
        return self._writer.begin(session, batch, may_begin)

    def forget(self, sessions: Collection[str]) -> None:
        """Drop what is known of peers: see `Writer.forget`."""
        self._reach.forget(sessions)
        self._writer.forget(sessions)

    def close(self) -> None:
        """Unregister all memory and stop. Call it after all writes have returned. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine = None
        try:
            self._memory.close()
        except RegistrationError as error:
            raise TransferError(self._session, str(error), retryable=False) from None

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(self._session, "this engine is closed", retryable=False)


def _start(host: str, protocol: str) -> Any:
    """Start a Mooncake engine of our own. Raises LibraryError and RuntimeError."""
    # Not earlier: Mooncake reads some settings when its library is loaded.
    engine: Any = mooncake_library.load()()
    mooncake_library.check_protocol(protocol, ascend.is_loaded(Path("/proc/self/maps").read_text()))
    with mooncake_library.forced_tcp(protocol):
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if code != 0:
        raise RuntimeError(f"Mooncake did not start with protocol {protocol!r} (code {code})")
    return engine
