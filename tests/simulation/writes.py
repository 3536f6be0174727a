# SPDX-License-Identifier: Apache-2.0
"""Mooncake's engine. A batch reads its sources late. Its bytes arrive in any order, even if the batch has failed."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulation.kernel import kernel
from simulation.network import network
from simulation.stand_ins import Event

if TYPE_CHECKING:
    from simulation.engine import Rank
    from simulation.world import World

# Bytes that came while a rank was stopped are in memory so long after it has gone on, at most. `TransferLimits.apply_s`
# is longer.
_APPLIED_WITHIN_S = 2.0


class _Batch:
    """A batch that `get_batch_transfer_status` waits for."""

    def __init__(self, pieces: int) -> None:
        self.over = Event()
        self.code: int | None = None
        # Pieces that have not arrived.
        self.pieces = pieces

    def end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.over.set()


class Mooncake:
    """Mooncake's engine of one rank."""

    def __init__(self, world: "World", rank: "Rank", host: str) -> None:
        self._world = world
        self.rank = rank
        self._port = network().new_port()
        self._session = f"{host}:{self._port}"
        # Registered memory: address -> size.
        self._regions: dict[int, int] = {}
        # Whether its memory was unregistered, so that nobody listens any more.
        self._has_ended = False
        self._batches: dict[int, _Batch] = {}
        self._next = 1
        world.mooncakes[self._session] = self

    def get_rpc_port(self) -> int:
        return self._port

    def batch_register_memory(self, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        self._regions.update(zip(addresses, sizes, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        for each in addresses:
            self._regions.pop(each, None)
        self._has_ended = not self._regions
        return 0

    def send_probe(self, session: str) -> int:
        kernel().park(0.0005)
        while (peer := self._peer(session)) is not None and (peer.rank.process.stopped or self._is_cut_off(peer)):
            kernel().park(0.05)
        return 0 if peer is not None else -1

    def batch_transfer_async_write(
        self, session: str, sources: Sequence[int], destinations: Sequence[int], lengths: Sequence[int]
    ) -> int:
        faults, world = self._world.scenario.faults, self._world
        draw = kernel().draws(f"writes of {self.rank.name}")
        count = len(lengths)
        takes_s = 0.0003 * (0.3 + draw.random()) + 1e-8 * sum(lengths)
        if draw.random() < faults.slow:
            takes_s *= faults.slow_by
        fails = draw.random() < faults.write_fails
        order = draw.sample(range(count), count)
        pieces = draw.randint(1, min(3, count))
        batch = self._batches[self._next] = _Batch(pieces)
        for piece in range(pieces):
            read_s = takes_s * draw.random()
            arrives_s = read_s + (takes_s - read_s) * draw.random()
            if fails and draw.random() < 0.5:  # this piece never arrives, or late
                if draw.random() < 0.3:
                    continue
                read_s = world.settle_s * 0.9 * draw.random()
                arrives_s = read_s + (world.settle_s * 0.95 - read_s) * draw.random()
            copies = [(sources[i], destinations[i], lengths[i]) for i in order[piece::pieces]]
            owners = [world.oracle.owner(self.rank, source) for source, _, _ in copies]
            kernel().at(read_s, self._read, session, batch, copies, owners, arrives_s - read_s)
        if fails:
            kernel().at(takes_s, self._fail, batch)
        kernel().at(world.config.write_timeout_s * 1.5, self._fail, batch)  # the peer stands still
        peer = self._peer(session)
        kernel().tell(
            "writes {} bytes to {}{}", sum(lengths), peer.rank.name if peer else session, ", and will fail" * fails
        )
        self._next += 1
        return self._next - 1

    def batch_transfer_sync_write(self, *_: object) -> int:
        return -1

    def get_batch_transfer_status(self, ids: Sequence[int]) -> int | None:
        batch = self._batches[ids[0]]
        batch.over.wait()
        del self._batches[ids[0]]
        return batch.code

    def _peer(self, session: str) -> "Mooncake | None":
        peer = self._world.mooncakes.get(session)
        return None if peer is None or peer._has_ended or peer.rank.process.dead else peer

    def _is_cut_off(self, peer: "Mooncake") -> bool:
        return network().cut_off_until(self.rank.process, peer.rank.process) > kernel().now

    def _fail(self, batch: _Batch) -> None:
        if self.rank.process.stopped:
            kernel().after_stop(self.rank.process, self._fail, batch)
        else:
            batch.end(-1)

    def _read(
        self,
        session: str,
        batch: _Batch,
        copies: list[tuple[int, int, int]],
        owners: list[object],
        arrives_s: float,
    ) -> None:
        process = self.rank.process
        if process.dead:
            return
        if process.stopped:  # what it has not handed to the kernel waits
            kernel().after_stop(process, self._read, session, batch, copies, owners, arrives_s)
            return
        for (source, _, _), owner in zip(copies, owners, strict=True):
            self._world.oracle.is_read(self.rank, source, owner)
        content = [(ctypes.string_at(source, size), destination) for source, destination, size in copies]
        kernel().at(arrives_s, self._arrive, session, batch, content)

    def _arrive(self, session: str, batch: _Batch, content: list[tuple[bytes, int]]) -> None:
        peer = self._peer(session)
        if peer is None or self._is_cut_off(peer):
            return
        if peer.rank.process.stopped:  # the bytes are in its socket buffers
            peer.rank.when_it_goes_on.append(lambda: self._apply_later(session, batch, content))
            return
        if batch.code == -1:
            kernel().tell("bytes of a failed write of {} arrive at {}", self.rank.name, peer.rank.name)
        for data, destination in content:
            self._world.oracle.arrives(peer.rank, destination, len(data), self.rank)
            stop = destination + len(data)
            if not any(at <= destination and stop <= at + size for at, size in peer._regions.items()):
                self._world.oracle.violated(f"R2: a write outside of the registered memory of {peer.rank.name}")
                return
            ctypes.memmove(destination, data, len(data))
        batch.pieces -= 1
        if batch.pieces == 0:
            batch.end(0)

    def _apply_later(self, session: str, batch: _Batch, content: list[tuple[bytes, int]]) -> None:
        draw = kernel().draws(f"writes of {self.rank.name}")
        late_s = _APPLIED_WITHIN_S * draw.random() if self._world.scenario.faults.late_bytes else 0.0
        kernel().at(late_s, self._arrive, session, batch, content)
