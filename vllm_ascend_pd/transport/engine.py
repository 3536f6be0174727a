# SPDX-License-Identifier: Apache-2.0
"""The Mooncake transfer engine: one-sided writes from local memory into a peer's registered memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ascend_pd.core.hosts import authority, host_of, ip_version
from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.transport import ascend, mooncake_library
from vllm_ascend_pd.transport.batches import Batch, Batches
from vllm_ascend_pd.transport.hixl_engine import describe_transport
from vllm_ascend_pd.transport.limits import SettingError, TransferLimits, export_settings
from vllm_ascend_pd.transport.pace import Pace
from vllm_ascend_pd.transport.peer_queue import PeerQueue
from vllm_ascend_pd.transport.regions import Region
from vllm_ascend_pd.transport.registered_memory import RegisteredMemory, RegistrationError
from vllm_ascend_pd.transport.shared_engine import SharedEngine

logger = logging.getLogger(__name__)


class TransferError(Exception):
    """A registration or a write failed. Bytes of a failed write may have arrived, entirely or in part.

    With `may_arrive` they may also still arrive, and sources may still be read: see `TransferLimits.settle_s`.
    """

    def __init__(self, session: str, reason: str, retryable: bool, may_arrive: bool = False) -> None:
        super().__init__(f"transfer to {session} failed: {reason}")
        self.session = session
        self.reason = reason
        self.may_arrive = may_arrive
        self.retryable = retryable
        """Whether the same write may succeed later. Mooncake answers most failures with a bare -1, so an
        address that the peer refuses counts as retryable too: bound the number of retries."""


@dataclass
class _Peer:
    """`queue`: None where Mooncake has none to it. `answers`: a probe was answered, and no write has failed since."""

    queue: PeerQueue | None
    pace: Pace = field(default_factory=Pace)
    answers: bool = False

    def leave(self, descriptors: int, *, failed: bool) -> None:
        """A batch has ended, or was not begun after all."""
        if self.queue is not None:
            self.queue.leave(descriptors, failed=failed)


@dataclass(slots=True)
class Flight:
    """A batch on its way. `batch_id`: Mooncake's, if it has one."""

    engine: Any
    session: str
    peer: _Peer
    lengths: list[int]
    started: float
    batch_id: int = 0

    def wait(self) -> None:
        """Until the receiver has acknowledged every byte as stored. Once. Raises `TransferError`."""
        num_bytes = sum(self.lengths)
        if pause_s := self.peer.pace.pause_s(num_bytes, self.started):
            time.sleep(pause_s)
        try:
            code = int(self.engine.get_batch_transfer_status([self.batch_id]))
        except Exception as error:
            raise self.lost(repr(error), retryable=False) from error
        if code == 0:
            self.peer.pace.arrived(num_bytes, self.started)
        self.land(code)

    def land(self, code: int) -> None:
        """It has ended with Mooncake's `code`. Raises `TransferError`."""
        if code != 0:
            raise self.lost(
                f"{code} (the peer is gone, hangs or refuses the addresses: Mooncake's log on standard error says "
                "which)",
                retryable=True,
            )
        self.peer.leave(len(self.lengths), failed=False)

    def lost(self, answer: str, retryable: bool) -> TransferError:
        """It has failed with what Mooncake answered, and its bytes may still arrive."""
        self.peer.leave(len(self.lengths), failed=True)
        self.peer.answers = False  # the next write probes first
        return TransferError(
            self.session,
            f"a batch of {len(self.lengths)} descriptors, {sum(self.lengths)} bytes, ended after "
            f"{time.monotonic() - self.started:.1f} s with {answer}",
            retryable,
            may_arrive=True,
        )


class TransferEngine:
    """One Mooncake engine. `write` may be called from any thread; Mooncake works without the GIL.

    Time bounds, over TCP and with `limits.timeout_s` rounded up to whole seconds:

    - a session that was never written to, or whose last write failed, is probed first and must answer
      within `timeout_s`. Without this, a peer that accepts connections but does not answer would block every
      write of the process for 60 s: Mooncake reads a peer's metadata under a lock that all writes take;
    - a batch to a peer that hangs fails after `timeout_s`, or when `MC_TRANSFER_TIMEOUT` ends the wait.

    While Mooncake waits for a batch it spins on a core; over TCP, only for the end of what the batch takes (`pace.py`).
    """

    def __init__(self, host: str, protocol: str, limits: TransferLimits) -> None:
        """Start an engine that listens on `host`. `protocol`: "tcp", "rdma" or "ascend".

        Settings that the environment already holds win over those of `limits`. For "ascend" the device must
        have been set before, and the Mooncake engine is the one of vllm-ascend's connectors, if there are any.
        """
        findings = ascend.check() if protocol == "ascend" else []
        if fatal := [finding.message for finding in findings if finding.fatal]:
            raise TransferError(host, "; ".join(fatal), retryable=False)
        shared = SharedEngine.find() if protocol == "ascend" else None
        if shared is not None:
            shared.fix_settings()
        try:
            self._limits, self._capacity = export_settings(limits, protocol, host)
        except SettingError as error:
            raise TransferError(host, str(error), retryable=False) from None
        self._over_tcp = protocol == "tcp"
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._probes: dict[str, Future[int]] = {}
        self._closed = False
        try:
            self._engine: Any = _start(host, protocol) if shared is None else shared.start(host)
        except mooncake_library.LibraryError as error:
            raise TransferError(host, str(error), retryable=False) from error
        except RuntimeError as error:
            reason = str(error)
            if protocol == "ascend":
                reason += f": {ascend.why_not_started(findings, os.environ)}"
            raise TransferError(host, reason, retryable=False) from error
        if protocol == "ascend" and not ascend.is_loaded(Path("/proc/self/maps").read_text()):
            reason = f"this Mooncake has no Ascend transport and would use TCP: {ascend.INSTALL}"
            raise TransferError(host, reason, retryable=False)
        for finding in findings:
            logger.warning("%s", finding.message)
        self._session = authority(host, self._engine.get_rpc_port())
        self._transport = describe_transport(protocol)
        chip = ascend.chip_name() if protocol == "ascend" else None
        self._memory = RegisteredMemory(self._engine, chip, shared)

    @property
    def transport(self) -> TransportInfo:
        """How this engine moves bytes, for peers to compare with theirs."""
        return self._transport

    @property
    def session(self) -> str:
        """Where peers reach this engine: "host:rpc_port", an IPv6 host in brackets."""
        return self._session

    @property
    def limits(self) -> TransferLimits:
        return self._limits

    def register(self, regions: Sequence[Region], of_caches: bool = False) -> None:
        """Make `regions` writable for peers. All or none; call before peers learn of them.

        Overlapping regions become one. Regions that are registered already are skipped; ones that overlap them in
        part are refused, and so is what protocol "ascend" does not allow. `of_caches`: they are the KV caches, which
        other connectors of this process register, too.
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
        """Copy what `batches` say, which were cut to `limits`, into the memory of `session`, in order.

        Blocks until the receiver has acknowledged every byte as stored; raises `TransferError` as soon as one
        batch failed, and later batches are not sent. The order of arrival is undefined. Writing again is
        safe: the same bytes go to the same place. When it raised, sources must stay unchanged for
        `limits.settle_s` more seconds.

        `may_begin()` is asked right before each batch, after all waiting for the peer; a no ends the write. No byte
        of a batch arrives later than `limits.settle_s` after that.
        """
        for batch in batches:
            if (flight := self.begin(session, batch, may_begin)) is not None:
                flight.wait()

    def has_room(self, session: str, batch: Batch) -> bool:
        """Whether `begin` would not have to wait for other batches to the peer."""
        with self._lock:
            peer = self._peers.get(session)
        return peer is None or peer.queue is None or peer.queue.has_room(len(batch[2]))

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> Flight | None:
        """Send one batch on its way, and return before it has arrived where Mooncake can do that for us (over TCP);
        None once it has arrived. As `write_batches` in all else; over TCP it blocks while `peer_queue.BATCHES` batches
        to this peer are under way."""
        self._check_open()
        peer, started = self._reach(session), time.monotonic()
        lengths = batch[2]
        if peer.queue is not None and not peer.queue.enter(len(lengths), self._limits.timeout_s):
            raise TransferError(
                session, f"earlier writes did not finish within {self._limits.timeout_s:g} s", retryable=True
            )
        try:
            if not may_begin():
                raise TransferError(session, "the leave to write ended before the write did", retryable=False)
        except BaseException:
            peer.leave(len(lengths), failed=False)
            raise
        flight = Flight(self._engine, session, peer, lengths, started)
        try:
            if self._over_tcp:
                flight.batch_id = int(self._engine.batch_transfer_async_write(session, *batch))
                if flight.batch_id != 0:
                    return flight
            # Also when it was refused: only this call makes Mooncake forget what it knows of a peer that has changed.
            code = int(self._engine.batch_transfer_sync_write(session, *batch))
        except Exception as error:
            raise flight.lost(repr(error), retryable=False) from error
        flight.land(code)
        return None

    def forget(self, sessions: Collection[str]) -> None:
        """Drop what is known of sessions that will not be written to again. Harmless if they are after all."""
        with self._lock:
            for session in sessions:
                self._peers.pop(session, None)

    def close(self) -> None:
        """Unregister everything and stop. Call it after all writers have returned; twice is safe."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine = None
        try:
            self._memory.close()
        except RegistrationError as error:
            raise TransferError(self._session, str(error), retryable=False) from None

    def _reach(self, session: str) -> _Peer:
        """The peer behind `session`, probed if it is new or failed before."""
        known = self._peers.get(session)
        if known is not None and known.answers:
            return known
        ours, theirs = (ip_version(host_of(each)) for each in (self._session, session))
        if None not in (ours, theirs) and ours != theirs:
            raise TransferError(
                session,
                f"its address is IPv{theirs}, and this engine's is IPv{ours}: Mooncake uses one of them. Set "
                "VLLM_HOST_IP to addresses of one kind on prefill and decode",
                retryable=False,
            )
        with self._lock:
            peer = self._peers.get(session)
            if peer is None:
                queue = PeerQueue(self._capacity, self._limits.settle_s) if self._over_tcp else None
                peer = self._peers[session] = _Peer(queue)
            if peer.answers:  # another thread's probe was answered meanwhile
                return peer
            probe = self._probes.get(session)
            if probe is None:
                probe = Future()
                # Mooncake gives up reading an answer after 60 s: that bounds the thread, not its caller.
                thread = threading.Thread(
                    target=self._probe, args=(session, probe), name=f"probe {session}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the process may have no more threads
                    raise TransferError(session, f"not probed: {error}", retryable=True) from error
                self._probes[session] = probe
        try:
            code = probe.result(self._limits.timeout_s)
        except FutureTimeout as error:
            raise TransferError(
                session,
                f"no answer to a probe within {self._limits.timeout_s:g} s: the peer hangs or is cut off",
                retryable=True,
            ) from error
        if code != 0:
            raise TransferError(session, f"unreachable (probe returned {code}): the peer is gone", retryable=True)
        peer.answers = True
        return peer

    def _probe(self, session: str, answer: Future[int]) -> None:
        try:
            code = int(self._engine.send_probe(session))
        except Exception as error:  # noqa: BLE001 - delivered to every writer that waits for the answer
            answer.set_exception(TransferError(session, f"probe failed: {error}", retryable=True))
        else:
            answer.set_result(code)
        finally:
            with self._lock:
                self._probes.pop(session, None)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(self._session, "this engine is closed", retryable=False)


def _start(host: str, protocol: str) -> Any:
    """A Mooncake engine of our own. Raises LibraryError and RuntimeError."""
    # Only now: some of Mooncake's settings are read when its library is loaded.
    engine: Any = mooncake_library.load()()
    mooncake_library.check_protocol(protocol, ascend.is_loaded(Path("/proc/self/maps").read_text()))
    with mooncake_library.forced_tcp(protocol):
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if code != 0:
        raise RuntimeError(f"Mooncake did not start with protocol {protocol!r} (code {code})")
    return engine
