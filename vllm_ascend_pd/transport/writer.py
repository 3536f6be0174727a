# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that writes to peers: `TcpWriter` and `AscendWriter`. Both probe a peer first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

from vllm_ascend_pd.core.hosts import host_of, ip_version
from vllm_ascend_pd.transport.batches import Batch

BATCHES_IN_FLIGHT = 2
"""Batches that a sender keeps in flight: one is prepared while the other is on its way."""

LEASE_EXPIRED = "the lease ended before the write did"
"""The reason of a write that `may_begin` has ended."""


class TransferError(Exception):
    """A registration or a write failed. Some or all bytes of a failed write may have arrived."""

    def __init__(
        self, session: str, reason: str, retryable: bool, may_arrive: bool = False, no_answer: bool = False
    ) -> None:
        super().__init__(f"transfer to {session} failed: {reason}")
        # The peer's address, or this engine's if it failed by itself.
        self.session = session
        # What went wrong, without the address.
        self.reason = reason
        # Whether bytes may still arrive, and sources may still be read, for `TransferLimits.settle_s` more seconds.
        self.may_arrive = may_arrive
        # Whether the same write may succeed later. Mooncake answers most failures with a bare -1, so an address that
        # the peer refuses counts as retryable, too. Bound the number of retries.
        self.retryable = retryable
        # Whether nothing was written, because the peer has not answered a probe.
        self.no_answer = no_answer


class Flight(Protocol):
    """A batch in flight."""

    # The peer's address.
    session: str

    def wait(self) -> None:
        """Block until the receiver has every byte. Call it exactly once, on any thread.

        After it has returned, the batch's source memory may change. After `TransferError` it may change, too, unless
        the error's `may_arrive` is set: then it must stay unchanged for `TransferLimits.settle_s` more seconds.
        """


class Writer(Protocol):
    """Writes batches to peers. Any thread may call any method at any time."""

    def has_room(self, session: str, batch: Batch) -> bool:
        """Return whether `begin` would start `batch` without waiting for batches in flight. Never blocks."""

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> Flight | None:
        """Start to write one batch, which has bytes. Return its `Flight`, or None if every byte has arrived already.

        `session`: the peer's `TransferEngine.session`. `batch`: cut to this engine's limits. Its lists may be reused
        after the return. Its source memory must stay unchanged until `Flight.wait` has returned.
        `may_begin`: called after all waiting, right before each call that starts the batch. If it returns False,
        nothing is written and `TransferError` is raised.

        Blocks until the peer answers a probe, if it is new or failed before, and until there is room for the batch:
        for `TransferLimits.timeout_s` each. Raises `TransferError` if either takes longer, or Mooncake refuses the
        batch.
        """

    def forget(self, sessions: Collection[str]) -> None:
        """Drop what is known of peers. Call it when no further write to them is expected. A later write is allowed."""


class Reach:
    """Probes a peer's process before the first write to it, and after each failed one. Any thread may call it.

    Mooncake reads a new peer's metadata for up to 60 s, under a lock that every write of the process takes. A process
    that is stopped or cut off does not answer a probe either, so such a peer never gets that lock. A probe says nothing
    about the network between NPUs.
    """

    def __init__(self, mooncake: Any, own_session: str, timeout_s: float) -> None:
        """`mooncake`: Mooncake's engine. `timeout_s`: how long an answer may take."""
        self._mooncake = mooncake
        self._own_session = own_session
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # The two below change under the lock.
        # Sessions that answered, and to which no write has failed since.
        self._answering: set[str] = set()
        # Probes in flight, by session.
        self._probes: dict[str, Future[int]] = {}

    def await_answer(self, session: str) -> None:
        """Waits until the peer has answered a probe, if it is new or its last write failed. Raises TransferError."""
        if session in self._answering:
            return
        self._check_address(session)
        with self._lock:
            if session in self._answering:  # another thread's probe was answered meanwhile
                return
            probe = self._probes.get(session) or self._start(session)
        try:
            code = probe.result(self._timeout_s)
        except FutureTimeout as error:
            raise TransferError(
                session,
                f"no answer to a probe within {self._timeout_s:g} s: the peer hangs or is cut off",
                retryable=True,
                no_answer=True,
            ) from error
        if code != 0:
            reason = f"unreachable (probe returned {code}): the peer is gone"
            raise TransferError(session, reason, retryable=True, no_answer=True)
        with self._lock:
            self._answering.add(session)

    def failed(self, session: str) -> None:
        """Records that a write has failed: the next one probes first."""
        with self._lock:
            self._answering.discard(session)

    def forget(self, sessions: Collection[str]) -> None:
        """As `Writer.forget`."""
        with self._lock:
            self._answering.difference_update(sessions)

    def _check_address(self, session: str) -> None:
        ours, theirs = (ip_version(host_of(each)) for each in (self._own_session, session))
        if None not in (ours, theirs) and ours != theirs:
            raise TransferError(
                session,
                f"its address is IPv{theirs}, and this engine's is IPv{ours}: Mooncake uses one of them. Set "
                "VLLM_HOST_IP to addresses of one kind on prefill and decode",
                retryable=False,
            )

    def _start(self, session: str) -> Future[int]:
        probe: Future[int] = Future()
        # Mooncake stops reading an answer after 60 s, which bounds the thread. The caller waits for less.
        thread = threading.Thread(target=self._probe, args=(session, probe), name=f"probe {session}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            raise TransferError(session, f"not probed: {error}", retryable=True) from error
        self._probes[session] = probe
        return probe

    def _probe(self, session: str, answer: Future[int]) -> None:
        try:
            code = int(self._mooncake.send_probe(session))
        except Exception as error:  # noqa: BLE001 - delivered to every writer that waits for the answer
            answer.set_exception(TransferError(session, f"probe failed: {error}", retryable=True))
        else:
            answer.set_result(code)
        finally:
            with self._lock:
                self._probes.pop(session, None)
