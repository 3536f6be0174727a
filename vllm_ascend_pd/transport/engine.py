# SPDX-License-Identifier: Apache-2.0
"""The Mooncake transfer engine: one-sided writes from local memory into a peer's registered memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.transport import ascend
from vllm_ascend_pd.transport.batches import Batch, Batches, covered, merge_regions
from vllm_ascend_pd.transport.peer_queue import PeerQueue, most_descriptors

logger = logging.getLogger(__name__)

KIB = 1024
MIB = 1024 * KIB

_TCP_TIMEOUTS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": 1.0,
    "MC_TCP_STATUS_TIMEOUT_SEC": 1.0,
    "MC_TCP_ADMISSION_TIMEOUT_MS": 1e-3,
}
"""What `TransferLimits.settle_s` counts on, and their units in seconds."""

_TCP_LANES = 4
"""Mooncake's default number of TCP connections to one peer (`MC_TCP_LANES_PER_PEER`)."""

_TCP_QUEUE = ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER")
"""What Mooncake's queue to one peer takes is the sum of these."""


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


@dataclass(frozen=True)
class TransferLimits:
    """What one call into Mooncake may carry, and for how long it may block."""

    max_descriptors: int = 512
    """Descriptors in one batch. Over TCP a descriptor costs about 30 us, so 512 are 15 ms."""
    max_bytes: int = 64 * MIB
    """Bytes in one batch: what a failed batch makes the caller send again."""
    max_descriptor_bytes: int = 4 * MIB
    """Longer descriptors are cut, so that they spread over the peer's connections."""
    timeout_s: float = 10.0
    """A batch fails when its last descriptor is not under way after this long, or one makes no progress for
    this long; so two batches of `max_bytes` must take less. Mooncake counts in whole seconds: rounded up."""
    settle_at_least_s: float = 0.0
    """Lower bound of `settle_s`, where what the user has set in the environment makes Mooncake try for longer."""

    def __post_init__(self) -> None:
        if min(self.max_descriptors, self.max_bytes, self.max_descriptor_bytes) < 1 or self.timeout_s <= 0:
            raise ValueError(f"transfer limits must be positive: {self}")

    @property
    def whole_timeout_s(self) -> int:
        """`timeout_s` as Mooncake can count it."""
        return max(1, math.ceil(self.timeout_s))

    @property
    def settle_s(self) -> float:
        """Seconds after a failed write until this process has stopped reading its sources and sending it.

        Over TCP, a descriptor is admitted within one timeout or never, waits at most one more (and Mooncake's 1 s pause
        before it reconnects) for the connection before it, and is then given up one timeout and one pause
        later. What lies in socket buffers by then is the receiver's: a receiver that was stopped, not dead,
        applies up to a few MiB when it runs again. With protocol `ascend`: `ascend.settle_s`.
        """
        return max(3 * self.whole_timeout_s + 2, self.settle_at_least_s)

    def environment(self) -> dict[str, str]:
        """Mooncake's settings for these limits: it reads them from the environment when an engine starts.

        Sources: `transfer_engine_py.cpp` (`MC_TRANSFER_TIMEOUT`, seconds, never below 5: a backstop here),
        `tcp_transport_session_impl.h` (`MC_TCP_PROGRESS_TIMEOUT_SEC` while bytes flow,
        `MC_TCP_STATUS_TIMEOUT_SEC` for the receiver's acknowledgement), `tcp_transport.cpp` (the queue of
        each peer) and `config.cpp` (`MC_HANDSHAKE_CONNECT_TIMEOUT`, `MC_LOG_LEVEL`). `ascend.settings` has what
        protocol `ascend` needs beyond them.

        The queue proper is as short as the number of connections: what waits in it waits without a deadline, while
        what waits for admission to it expires after `MC_TCP_ADMISSION_TIMEOUT_MS`. With Mooncake's defaults a
        failed batch of 512 descriptors keeps trying for minutes; so it stops within `settle_s`.
        """
        seconds = str(self.whole_timeout_s)
        return {
            "MC_TRANSFER_TIMEOUT": str(max(5, self.whole_timeout_s + 1)),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
            "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
            "MC_TCP_ADMISSION_TIMEOUT_MS": str(1000 * self.whole_timeout_s),
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(_TCP_LANES),
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
            "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
            "MC_LOG_LEVEL": "WARNING",
        }


@dataclass(frozen=True)
class _Peer:
    queue: PeerQueue
    answers: threading.Event = field(default_factory=threading.Event)
    """Set: a probe was answered, and no write has failed since."""


class TransferEngine:
    """One Mooncake engine. `write` may be called from any thread; Mooncake works without the GIL.

    Time bounds, over TCP and with `limits.timeout_s` rounded up to whole seconds:

    - a session that was never written to, or whose last write failed, is probed first and must answer
      within `timeout_s`. Without this, a peer that accepts connections but does not answer would block every
      write of the process for 60 s: Mooncake reads a peer's metadata under a lock that all writes take;
    - a batch to a peer that hangs fails after `timeout_s`, or when `MC_TRANSFER_TIMEOUT` ends the wait.

    While Mooncake waits for a batch it spins on a core.
    """

    def __init__(self, host: str, protocol: str, limits: TransferLimits) -> None:
        """Start an engine that listens on `host`. `protocol`: "tcp", "rdma" or "ascend".

        Settings that the environment already holds win over those of `limits`. For "ascend" the device must
        have been set before.
        """
        findings = ascend.check() if protocol == "ascend" else []
        if fatal := [finding.message for finding in findings if finding.fatal]:
            raise TransferError(host, "; ".join(fatal), retryable=False)
        self._limits, self._capacity = _export_settings(limits, protocol)
        # Only now: some of Mooncake's settings are read when its library is loaded.
        from mooncake.engine import TransferEngine as MooncakeEngine

        self._engine: Any = MooncakeEngine()
        self._lock = threading.Lock()
        self._regions: list[tuple[int, int]] = []
        self._peers: dict[str, _Peer] = {}
        self._probes: dict[str, Future[int]] = {}
        self._closed = False
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            reason = f"Mooncake did not start with protocol {protocol!r} (code {code})"
            if protocol == "ascend":
                reason += f": {ascend.why_not_started(findings, os.environ)}"
            raise TransferError(host, reason, retryable=False)
        if protocol == "ascend" and not ascend.is_loaded(Path("/proc/self/maps").read_text()):
            reason = f"this Mooncake has no Ascend transport and would use TCP: {ascend.INSTALL}"
            raise TransferError(host, reason, retryable=False)
        for finding in findings:
            logger.warning("%s", finding.message)
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    @property
    def session(self) -> str:
        """Where peers reach this engine: "host:rpc_port"."""
        return self._session

    @property
    def limits(self) -> TransferLimits:
        return self._limits

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Make `regions` (address, bytes) writable for peers. All or none; call before peers learn of them.

        Overlapping and adjacent regions become one, since layers may be views into one storage. Regions that
        are registered already are skipped; ones that overlap them in part are refused.
        """
        with self._lock:
            self._check_open()
            known = list(self._regions)
            fresh = [region for region in merge_regions(regions) if not covered(region, known)]
            for address, size in fresh:
                if any(address < begin + length and begin < address + size for begin, length in known):
                    raise TransferError(
                        self._session,
                        f"region {address:#x}+{size} overlaps a registered one: register both in one call",
                        retryable=False,
                    )
            if not fresh:
                return
            addresses = [address for address, _ in fresh]
            code = self._engine.batch_register_memory(addresses, [size for _, size in fresh])
            if code != 0:
                self._engine.batch_unregister_memory(addresses)
                total = sum(size for _, size in fresh)
                raise TransferError(
                    self._session,
                    f"Mooncake did not register {len(fresh)} regions of {total} bytes (code {code})",
                    retryable=False,
                )
            self._regions = sorted(known + fresh)

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
        self._check_open()
        peer: _Peer | None = None
        for batch in batches:
            peer = peer or self._reach(session)
            self._write_batch(session, peer, may_begin, *batch)

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
            addresses = [address for address, _ in self._regions]
            self._regions = []
        engine, self._engine = self._engine, None
        code = engine.batch_unregister_memory(addresses) if addresses else 0
        if code != 0:
            raise TransferError(self._session, f"Mooncake did not unregister its memory (code {code})", retryable=False)

    def _write_batch(
        self,
        session: str,
        peer: _Peer,
        may_begin: Callable[[], bool],
        sources: list[int],
        destinations: list[int],
        lengths: list[int],
    ) -> None:
        started = time.monotonic()
        if not peer.queue.enter(len(lengths), self._limits.timeout_s):
            raise TransferError(
                session, f"earlier writes did not finish within {self._limits.timeout_s:g} s", retryable=True
            )
        failed = False
        try:
            if not may_begin():
                raise TransferError(session, "the leave to write ended before the write did", retryable=False)
            failed = True
            code = self._engine.batch_transfer_sync_write(session, sources, destinations, lengths)
            failed = code != 0
        finally:
            peer.queue.leave(len(lengths), failed=failed)
        if failed:
            peer.answers.clear()  # the next write probes first
            raise TransferError(
                session,
                f"a batch of {len(lengths)} descriptors, {sum(lengths)} bytes, returned {code} after "
                f"{time.monotonic() - started:.1f} s: the peer is gone, hangs or refuses the addresses "
                "(Mooncake's log on standard error says which)",
                retryable=True,
                may_arrive=True,
            )

    def _reach(self, session: str) -> _Peer:
        """The peer behind `session`, probed if it is new or failed before."""
        with self._lock:
            peer = self._peers.get(session)
            if peer is None:
                queue = PeerQueue(self._capacity, self._limits.settle_s)
                peer = self._peers[session] = _Peer(queue)
            if peer.answers.is_set():
                return peer
            probe = self._probes.get(session)
            if probe is None:
                probe = self._probes[session] = Future()
                # Mooncake gives up reading an answer after 60 s: that bounds the thread, not its caller.
                threading.Thread(
                    target=self._probe, args=(session, probe), name=f"probe {session}", daemon=True
                ).start()
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
        peer.answers.set()
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


def _export_settings(limits: TransferLimits, protocol: str) -> tuple[TransferLimits, int]:
    """Puts Mooncake's settings for `limits` into the environment. What was there already wins: returns the limits as
    that makes them, and how many descriptors Mooncake's queue to one peer takes."""
    settings = limits.environment()
    if protocol == "ascend":
        settings |= ascend.settings(limits.whole_timeout_s, os.environ)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if protocol == "ascend":
        settle_s = ascend.settle_s(limits.whole_timeout_s, os.environ)
    else:
        longest = max(_in_effect(name, float) * unit for name, unit in _TCP_TIMEOUTS.items())
        settle_s = dataclasses.replace(limits, timeout_s=max(limits.timeout_s, longest)).settle_s
    capacity = sum(_in_effect(name, int) for name in _TCP_QUEUE)
    descriptors = min(limits.max_descriptors, most_descriptors(capacity))
    return dataclasses.replace(limits, settle_at_least_s=settle_s, max_descriptors=descriptors), capacity


_Number = TypeVar("_Number", int, float)


def _in_effect(name: str, number: Callable[[str], _Number]) -> _Number:
    text = os.environ[name]
    with contextlib.suppress(ValueError):
        value = number(text)
        if value > 0:
            return value
    # Mooncake would take its own default, and what is counted here would be wrong.
    raise TransferError("this host", f"{name}={text!r} is not a number over 0", retryable=False)
