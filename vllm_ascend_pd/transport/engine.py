# SPDX-License-Identifier: Apache-2.0
"""The Mooncake transfer engine: one-sided writes from local memory into a peer's registered memory."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ascend_pd.core.ascend import Region, covered, doubt, merge, refusal
from vllm_ascend_pd.core.hosts import authority, ip_version
from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.core.protocol import EngineKind, TransportInfo
from vllm_ascend_pd.transport import ascend, mooncake_library
from vllm_ascend_pd.transport.ascend import AscendProblem, describe_transport
from vllm_ascend_pd.transport.ascend_writer import AscendWriter, Losses, Slots
from vllm_ascend_pd.transport.batches import LONGEST_SETTLE_S, Batch, PagedWrite, SettingError, TransferLimits
from vllm_ascend_pd.transport.mooncake_library import FORCE_TCP
from vllm_ascend_pd.transport.writer import Flight, Reach, TransferError, Writer

logger = logging.getLogger(__name__)


class TransferEngine:
    """One Mooncake engine: it registers memory of this process, and writes to memory of peers. Any thread may write.

    Before the first write to a peer, and after each failed one, the peer must answer a probe within `limits.timeout_s`
    (`Reach`). How a write waits and ends depends on the protocol: `AscendWriter` for "ascend", `TcpWriter` for
    "tcp" and "rdma".
    """

    def __init__(self, host: str, protocol: str, limits: TransferLimits, existing: Any = None) -> None:
        """Start an engine that listens on `host`. `protocol`: "tcp", "rdma" or "ascend".

        `existing`: vllm-ascend's `global_te`, for "ascend" only. It has the Mooncake engine that other connectors of
        this process use, too. None: there is none.

        Settings that the environment already holds win over those of `limits`. For "ascend", set the device first.
        Raises TransferError if the engine cannot start.
        """
        problem = ascend.check() if protocol == "ascend" else None
        if problem is not None and problem.is_fatal:
            raise TransferError(host, problem.message, retryable=False)
        if existing is not None and existing.transfer_engine is not None:
            _export(_DEFAULTS)  # it runs: settings have no effect any more
        try:
            # The limits in effect, which settings in the environment may have changed.
            self.limits = export_settings(limits, protocol, host)
        except SettingError as error:
            raise TransferError(host, str(error), retryable=False) from None
        self._host, self._protocol = host, protocol
        self._shared = existing
        self._lock = threading.Lock()
        self._closed = False
        # All registered regions, whoever registered them. Sorted and disjoint. Changes under the lock.
        self._known: list[Region] = []
        # Addresses of those that `close` unregisters. Changes under the lock.
        self._own: list[int] = []
        self._start(problem)
        if problem is not None:
            logger.warning("%s", problem.message)

    def _start(self, problem: AscendProblem | None) -> None:
        """Starts Mooncake's engine. `problem`: why it may fail. Raises TransferError."""
        host, protocol, existing = self._host, self._protocol, self._shared
        try:
            if problem is not None and problem.fatal_for:
                mooncake_library.load()  # before `offers`, which asks what it brings
                if ascend.kind(os.environ, ascend.offers()) in problem.fatal_for:
                    raise TransferError(host, problem.message, retryable=False)
            self._engine: Any = _start(host, protocol) if existing is None else existing.get_transfer_engine(host, None)
        except mooncake_library.LibraryError as error:
            raise TransferError(host, str(error), retryable=False) from error
        except RuntimeError as error:
            reason = str(error)
            if protocol == "ascend":
                reason += f": {ascend.why_not_started(problem, os.environ)}"
            raise TransferError(host, reason, retryable=False) from error
        if protocol == "ascend" and not ascend.is_loaded(Path("/proc/self/maps").read_text()):
            reason = f"this Mooncake has no Ascend transport and would use TCP: {ascend.INSTALL}"
            raise TransferError(host, reason, retryable=False)
        # The address of this engine for peers: "host:rpc_port", an IPv6 host in brackets.
        self.session = authority(host, self._engine.get_rpc_port())
        # How this engine moves bytes. Peers compare it with theirs.
        self.transport = describe_transport(protocol)
        # The chip's name, as `core.ascend.refusal` takes it. None: no limits of NPUs apply.
        self._chip = ascend.chip_name() if protocol == "ascend" else None
        # Told how batches end where links may be lost for good.
        self._losses = Losses() if self.transport.kind == EngineKind.COMM else None
        self._reach: Reach | None = Reach(self._engine, self.session, self.limits.timeout_s)
        self._writer: Writer | None = self._make_writer(protocol, self._reach)

    def _make_writer(self, protocol: str, reach: Reach) -> Writer:
        if protocol != "ascend":
            # Only here: the Ascend path imports nothing of TCP's queue bound and pause.
            from vllm_ascend_pd.transport.tcp import TcpWriter
            from vllm_ascend_pd.transport.tcp_settings import queue_capacity

            return TcpWriter(self._engine, reach, self.limits, queue_capacity())
        try:
            self.limits = limits_over_ascend(self.limits, self.transport)
        except SettingError as error:
            raise TransferError(self.session, str(error), retryable=False) from None
        slots = Slots(*ascend.slots(os.environ, ascend.connects_one_by_one(self.transport)))
        return AscendWriter(self._engine, reach, self.limits, slots, self._losses)

    @property
    def failure(self) -> str | None:
        """Why this process must be restarted to write again; None while nothing says so."""
        return None if self._losses is None else self._losses.failure

    def register(self, regions: Sequence[Region], of_caches: bool = False) -> None:
        """Register `regions`, so that peers can write to them and `write` can read them. All or none.

        Call it before peers learn of the addresses. Overlapping regions become one. Regions that are registered
        already are skipped. `of_caches`: they are the KV caches, which other connectors of this process register, too.

        Raises TransferError for regions that overlap registered ones in part, that protocol "ascend" does not allow,
        or that Mooncake refuses.
        """
        self._check_open()
        with self._lock:
            fresh = [region for region in merge(regions) if not covered(region, self._known)]
            for address, size in fresh:
                if any(address < begin + length and begin < address + size for begin, length in self._known):
                    raise self._error(
                        f"region {address:#x}+{size} overlaps a registered one: register both in one call"
                    )
            if not fresh:
                return
            together = sorted(self._known + fresh)
            if self._chip is not None and (reason := refusal(together, self._chip)) is not None:
                raise self._error(f"memory cannot be registered: {reason}")
            if self._chip is not None and (reason := doubt(together, self._chip)) is not None:
                logger.warning("%s", reason)
            if self._shared is not None and of_caches:
                self._register_for_all(fresh)
            else:
                self._register(fresh)
            self._known = together

    def write(self, session: str, sources: list[int], destinations: list[int], lengths: list[int]) -> None:
        """Copy `lengths[i]` bytes from `sources[i]` here to `destinations[i]` in the memory of `session`: see
        `write_batches`."""
        if not len(sources) == len(destinations) == len(lengths):
            raise ValueError(f"{len(sources)} sources, {len(destinations)} destinations, {len(lengths)} lengths")
        copies = Descriptors(*(np.array(column, dtype=np.int64) for column in (sources, destinations, lengths)))
        self.write_batches(session, PagedWrite([copies], self.limits, [sum(lengths)]).at([([0], [0])]))

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
        return self._awake().has_room(session, batch)

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> Flight | None:
        """Start to write one batch: see `Writer.begin`. Raises ValueError for a batch without bytes.

        Mooncake may end the process when it is asked for the status of an empty batch.
        """
        if not any(batch[2]):
            raise ValueError("a batch without bytes cannot be written")
        return self._awake().begin(session, batch, may_begin)

    def forget(self, sessions: Collection[str]) -> None:
        """Drop what is known of peers: see `Writer.forget`."""
        for each in (self._reach, self._writer):
            if each is not None:
                each.forget(sessions)

    def suspend(self) -> None:
        """Unregister the memory and stop, until `resume`: no byte of a peer arrives any more, whatever it does.

        Call it after all writes of this engine have returned. A second call does nothing. Raises TransferError, also
        for an engine that other connectors use, too.
        """
        if self._shared is not None:
            raise self._error("other connectors of this process use Mooncake's engine, too")
        self._end()

    def resume(self) -> None:
        """Start again, as another `session`, and register the same memory. Does nothing unless suspended. Raises
        TransferError: then the engine stays suspended, and another call tries again."""
        self._check_open()
        if self._engine is not None:
            return
        try:
            self._start(ascend.check() if self._protocol == "ascend" else None)
            with self._lock:
                if self._known:
                    self._register(self._known)
        except TransferError:
            self._end()
            raise

    def close(self) -> None:
        """Unregister the memory that only this engine uses, and stop. Call it after all writes have returned. A second
        call does nothing. Raises TransferError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end()

    def _end(self) -> None:
        """Unregisters this engine's memory and ends Mooncake's engine, with all that refers to it."""
        with self._lock:
            own, self._own = self._own, []
            mooncake, self._engine, self._reach, self._writer = self._engine, None, None, None
        code = mooncake.batch_unregister_memory(own) if own else 0
        if code != 0:
            raise self._error(f"Mooncake did not unregister its memory (code {code})")

    def _check_open(self) -> None:
        if self._closed:
            raise self._error("this engine is closed")

    def _awake(self) -> Writer:
        if self._writer is None:
            self._check_open()
            raise self._error("this engine sleeps")
        return self._writer

    def _register(self, regions: Sequence[Region]) -> None:
        addresses = [address for address, _ in regions]
        code = self._engine.batch_register_memory(addresses, [size for _, size in regions])
        if code != 0:
            self._engine.batch_unregister_memory(addresses)
            raise self._error(f"{_not_registered(regions)} (code {code})")
        self._own += addresses

    def _register_for_all(self, regions: Sequence[Region]) -> None:
        """Registers this process's KV caches, unless another connector has. They stay registered.

        Two engines of one process cannot both register them:

        - HCCL refuses memory that overlaps other registered memory of the process, unless both are equal. Older
          versions refuse equal memory, too (global_mem_manager.cc, `CheckOverlapAndInsert`).
        - Within one engine, Mooncake refuses both (transfer_engine_impl.cpp).
        """
        try:
            self._shared.register_buffer([address for address, _ in regions], [size for _, size in regions])
        except RuntimeError as error:
            raise self._error(f"{_not_registered(regions)}: {error}") from error

    def _error(self, reason: str) -> TransferError:
        return TransferError(self.session, reason, retryable=False)


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


def _not_registered(regions: Sequence[Region]) -> str:
    return f"Mooncake did not register {len(regions)} regions of {sum(size for _, size in regions)} bytes"


# Puts Mooncake's settings into the environment, from where it reads them when an engine starts.
#
# What the environment holds already wins, so the limits may become others than those asked for. With protocol "ascend"
# nothing of TCP is imported.

_DEFAULTS = {
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_THREAD_POOL_SIZE": "8",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
    "MC_TRANSFER_TIMEOUT": "30",
}
"""Mooncake's defaults, from transfer_executor_base.h, slice_dispatcher.cpp and transfer_engine_py.cpp."""

# If it is set, to whatever value, Mooncake listens and connects over IPv6; else over IPv4.
_IPV6 = "MC_USE_IPV6"


def export_settings(limits: TransferLimits, protocol: str, host: str) -> TransferLimits:
    """Exports the settings for an engine at `host`, and returns the limits in effect.

    For "ascend", `limits_over_ascend` completes them when the engine has started. Raises SettingError for settings in
    the environment that cannot work.

    Sources: Mooncake's `transfer_engine_py.cpp` (`MC_TRANSFER_TIMEOUT`, in seconds, never below 5) and `config.cpp`
    (`MC_HANDSHAKE_CONNECT_TIMEOUT`, `MC_LOG_LEVEL`).
    """
    if protocol != "tcp" and FORCE_TCP in os.environ:
        raise SettingError(
            f"{FORCE_TCP} is set, which turns {protocol!r} into TCP: unset it, or set transfer_protocol to tcp"
        )
    timeout_s = limits.whole_timeout_s
    settings = {
        "MC_TRANSFER_TIMEOUT": str(max(5, timeout_s + 1)),  # a backstop: other timeouts are shorter
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(timeout_s),
        "MC_LOG_LEVEL": "WARNING",
    }
    version = ip_version(host)
    if version == 6:
        settings[_IPV6] = "1"
    elif version == 4 and _IPV6 in os.environ:
        raise SettingError(
            f"{_IPV6} is set, and this host's address is IPv4, where Mooncake would not be found: unset it, or set "
            "VLLM_HOST_IP to this host's IPv6 address"
        )
    if protocol == "ascend":
        _export(settings | ascend.settings(timeout_s, os.environ) | {"MC_LOG_LEVEL": ascend.LOG_LEVEL})
        return dataclasses.replace(limits, connections=1)
    from vllm_ascend_pd.transport import tcp_settings

    _export(settings | tcp_settings.settings(timeout_s))
    return tcp_settings.limits_in_effect(limits, protocol)


def limits_over_ascend(limits: TransferLimits, transport: TransportInfo) -> TransferLimits:
    """Returns `limits` as the environment and the started engine make them. Raises SettingError."""
    settle_s = ascend.settle_s(limits.whole_timeout_s, os.environ, transport)
    if settle_s > LONGEST_SETTLE_S:
        raise SettingError(
            f"with these ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT a batch may take {settle_s:.0f} s, and "
            f"decode waits for {LONGEST_SETTLE_S:.0f} s: lower them"
        )
    if ascend.pool_size(os.environ) < 1:
        raise SettingError(f"{ascend.POOL_SIZE}={os.environ[ascend.POOL_SIZE]!r}: Mooncake would write nothing")
    return dataclasses.replace(limits, settle_at_least_s=settle_s, failed_may_arrive=False)


def _export(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)
