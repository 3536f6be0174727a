# SPDX-License-Identifier: Apache-2.0
"""The steps of `vllm-ascend-pd doctor --hardware --peer HOST`: between this server and another one, where the same
command runs with this server's address.

A child on NPU 0 of each server does all of it (`main`). The two talk over an encrypted and authenticated socket, made
as the side channel's are. The server with the smaller address listens. Both do the steps in the same order.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllm_ascend_pd.core.hosts import authority, is_loopback
from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.tools.doctor.report import Finding, error, ok, progress
from vllm_ascend_pd.tools.programs import child, run

if TYPE_CHECKING:
    import zmq

    from vllm_ascend_pd.tools.doctor.loopback import NpuMemory
    from vllm_ascend_pd.transport.dealer import Dealer
    from vllm_ascend_pd.transport.engine import TransferEngine

PORT = 18900
"""The listening server's, for this check alone. The group of ranks takes the one after it."""
WAIT_S = 300.0
"""How long the other server's command is waited for."""
SIZES = tuple((16 << 10) << doubled for doubled in range(13))
"""Bytes of the measured descriptors: 16 KiB to 64 MiB."""

_STEP_S = 60.0
_TIMEOUT_S = 600.0
_MAX_MESSAGE_BYTES = 64 << 10
_ECHOES = 20
_FLUSH_MS = 5000
_LINK = (
    "check that the NPUs' ports are connected and in one network: `hccn_tool -i N -ping -g address OTHER`; "
    "plog in ~/ascend/log says why HIXL failed"
)
T = TypeVar("T")


class Between(msgspec.Struct, frozen=True):
    """Who talks to whom, and how much."""

    own: str  # this server's address
    other: str
    secret_file: str | None
    port: int = PORT
    sizes: tuple[int, ...] = SIZES


class Hello(msgspec.Struct, frozen=True):
    """What one server tells the other first."""

    transport: TransportInfo
    chip: str
    session: str  # of its transfer engine
    address: int  # of its memory there


def listens(own: str, other: str) -> bool:
    """Returns whether the server at `own` listens, and so has rank 0. Raises ValueError for the same address twice."""
    mine, theirs = ipaddress.ip_address(own), ipaddress.ip_address(other)
    if mine == theirs:
        raise ValueError(f"--peer {other} is this server's own address (VLLM_HOST_IP)")
    return (mine.version, int(mine)) < (theirs.version, int(theirs))


def check(between: Between, secret: Secret | None) -> list[Finding]:
    """Runs the steps with the other server."""
    name = "peer.meeting"
    try:
        first = listens(between.own, between.other)
    except ValueError as problem:
        action = "give the other server's IP address, by which engines here reach it, and run the same command there"
        return [error(name, str(problem), action)]
    if secret is None and not (is_loopback(between.own) and is_loopback(between.other)):
        action = "make one with `vllm-ascend-pd secret`, and copy it to the other server (docs/security.md)"
        return [error(name, "two servers need the cluster's secret, and there is none here", action)]
    port = f"port {between.port}" + (" here" if first else f" of {between.other}")
    progress(f"waiting for the same command on {between.other}, at {port}")
    ran = run(child(f"{__package__}.peer", msgspec.json.encode(between).decode()), _TIMEOUT_S + WAIT_S)
    findings = ran.reports(Finding)
    if ran.problem is None:
        return findings
    return [*findings, error("peer.end", f"the steps with {between.other} stopped: {ran.ending}", _LINK)]


def published(chip: str, kind: str, size: int) -> list[str]:
    """Returns the GB/s that HIXL publishes for descriptors of `size` bytes, for each link of such chips and engines."""
    from vllm_ascend_pd.tools.write_costs import HIXL  # imports numpy

    family = {"Ascend910B": "A2", "Ascend910_93": "A3"}
    name = next((each for begin, each in family.items() if chip.startswith(begin)), "")
    engine = {"comm": "comm", "client/server": "cs"}.get(kind, "")
    rows = [each for each in HIXL if (each.chip, each.engine) == (name, engine)]
    measured = [(each.link, dict(zip(each.sizes, each.rates, strict=False))) for each in rows]
    return [f"{link} {rates[size]:g}" for link, rates in measured if size in rates]


# What follows runs in the child process.


class Wire:
    """Messages between the two servers. Each `receive` waits for the other's `send`, within a time limit."""

    def __init__(self, between: Between, secret: Secret | None) -> None:
        """Listens or connects. Raises what ZMQ raises."""
        import zmq

        from vllm_ascend_pd.core.hosts import AnyHost
        from vllm_ascend_pd.transport.curve import Guard, side_channel_keys
        from vllm_ascend_pd.transport.dealer import Dealer

        self._zmq, self._context = zmq, zmq.Context()
        self._identity: bytes | None = None
        self._guard: Guard | None = None
        self._dealer: Dealer | None = None
        if listens(between.own, between.other):
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            self._socket.setsockopt(zmq.IPV6, int(":" in between.own))
            self._guard = Guard(self._context, self._socket, secret, AnyHost())
            self._socket.bind(f"tcp://{authority(between.own, between.port)}")
        else:
            keys = [] if secret is None else side_channel_keys(secret)[:1]
            endpoint = f"tcp://{authority(between.other, between.port)}"
            self._dealer = Dealer(self._context.socket, endpoint, keys)
            self._socket = self._dealer.socket

    def close(self) -> None:
        """Waits until the other server has what was sent, for some seconds: this process ends at once afterwards."""
        if self._dealer is not None:
            self._dealer.close(_FLUSH_MS)
        else:
            self._socket.close(linger=_FLUSH_MS)
        if self._guard is not None:
            self._guard.socket.close(linger=0)
        self._context.term()  # waits for sockets that are open

    def send(self, message: object) -> None:
        content = msgspec.json.encode(message)
        self._socket.send_multipart([content] if self._guard is None else [self._identity or b"", content])

    def receive(self, kind: type[T], timeout_s: float = _STEP_S) -> T:
        """Raises TimeoutError, and ValueError for anything but such a message."""
        deadline = time.monotonic() + timeout_s
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        if self._guard is not None:
            poller.register(self._guard.socket, self._zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(min(left, 1.0) * 1000) + 1))
            if self._guard is not None:
                self._guard.attend()
            if self._socket in ready:
                *sender, content = self._socket.recv_multipart()
                if sender and self._identity not in (None, sender[0]):
                    continue  # a third one
                self._identity = sender[0] if sender else None
                return msgspec.json.decode(content, type=kind)
        raise TimeoutError(f"the other server has sent nothing for {timeout_s:g} s")


def main() -> Iterator[Finding]:
    from vllm_ascend_pd.transport.secret_files import cluster_secret

    between = msgspec.json.decode(sys.argv[1], type=Between)
    secret = cluster_secret(between.secret_file)
    first = listens(between.own, between.other)
    wire = Wire(between, secret)
    yield from meet(wire, first, between)
    yield from write_both_ways(wire, first, between)
    yield from exchange(wire, first, between)
    wire.close()


def meet(wire: Wire, first: bool, between: Between) -> Iterator[Finding]:
    """Measures the way over the servers' own network, by which tickets, grants and reports go."""
    began = time.monotonic()
    if first:
        wire.receive(str, WAIT_S)
        wire.send("here")
    else:
        wire.send("here")
        wire.receive(str, WAIT_S)
    waited = time.monotonic() - began
    times = []
    for _ in range(_ECHOES):
        asked = time.monotonic()
        if first:
            wire.send("echo")
            wire.receive(str)
        else:
            wire.receive(str)
            wire.send("echo")
        times.append(time.monotonic() - asked)
    shortest = min(times)
    found = f"{between.other} answers over the side channel's sockets in {shortest * 1e3:.3g} ms"
    yield ok("peer.side_channel", found, seconds=round(shortest, 6), waited_seconds=round(waited, 3))


def write_both_ways(wire: Wire, first: bool, between: Between) -> Iterator[Finding]:
    """Writes to the other server, which compares every byte, then the other way."""
    from vllm_ascend_pd.core.compatibility import cannot_write
    from vllm_ascend_pd.tools.doctor import loopback
    from vllm_ascend_pd.transport import ascend
    from vllm_ascend_pd.transport.batches import TransferLimits
    from vllm_ascend_pd.transport.engine import TransferEngine

    size = max(between.sizes)
    # Two halves: one is sent, the other is written to.
    memory = loopback.NpuMemory(2 * size, 0)
    engine = TransferEngine(between.own, "ascend", TransferLimits.over("ascend"))
    engine.register([memory.region])
    mine = Hello(engine.transport, ascend.chip_name(), engine.session, memory.address + size)
    wire.send(mine)
    theirs = wire.receive(Hello)
    if (reason := cannot_write(mine.transport, theirs.transport)) is not None:
        yield error("peer.write", reason, "install the same driver, CANN and Mooncake on both servers")
        return
    content = os.urandom(size)
    memory.fill(content)
    for turn in (first, not first):
        if turn:
            yield from _write(wire, engine, memory, content, theirs, between)
        else:
            _read(wire, memory, size)
    engine.close()


def _write(
    wire: Wire, engine: TransferEngine, memory: NpuMemory, content: bytes, theirs: Hello, between: Between
) -> Iterator[Finding]:
    from vllm_ascend_pd.tools.doctor import loopback

    way = f"to {between.other} by ascend"
    receiver = (theirs.session, theirs.address)
    try:
        connected = loopback.connect(engine, memory.address, receiver)
        engine.write(receiver[0], [memory.address], [receiver[1]], [len(content)])
        costs = [
            loopback.cost(engine, memory.address, receiver, "peer.write", len(content), size) for size in between.sizes
        ]
        engine.write(receiver[0], [memory.address], [receiver[1]], [len(content)])
    except Exception as problem:  # noqa: BLE001 - Mooncake's wheels raise all kinds
        wire.send("")
        yield error("peer.write", f"a write {way} failed: {problem}", _LINK)
        return
    wire.send(hashlib.sha256(content).hexdigest())
    if not wire.receive(bool):
        found = f"bytes {way} arrived wrong, without an error"
        yield error("peer.write", found, "do not use this Mooncake: install the version that requirements/ names")
        return
    took = f"; the first connection took {connected['first_connection_seconds']:.3g} s"
    yield ok("peer.write", f"{len(content) >> 10} KiB {way}, every byte right{took}", "", **connected)
    for size, each in zip(between.sizes, costs, strict=True):
        beside = published(theirs.chip, engine.transport.kind, size)
        hixl = f"; HIXL publishes {', '.join(beside)} GB/s" if beside else "; HIXL publishes no such figure"
        yield msgspec.structs.replace(each, found=each.found + hixl)


def _read(wire: Wire, memory: NpuMemory, size: int) -> None:
    """Waits for the other server's writes, and compares what has arrived last."""
    wanted = wire.receive(str, _TIMEOUT_S)
    if wanted:
        wire.send(hashlib.sha256(memory.read(2 * size)[size:]).hexdigest() == wanted)


def exchange(wire: Wire, first: bool, between: Between) -> Iterator[Finding]:
    """Makes a group of one rank on each server, as prefill's groups are made, and exchanges in it."""
    import torch
    import torch.distributed as dist

    from vllm_ascend_pd.device.npu import NpuDevice

    action = (
        "check HCCL_IF_IP and HCCL_SOCKET_IFNAME, and the NPUs' links; prefill engines of several servers need this"
    )
    try:
        os.environ.setdefault("HCCL_IF_IP", between.own)
        rank, host = int(not first), between.own if first else between.other
        began, timeout = time.monotonic(), timedelta(seconds=_STEP_S)
        store = f"tcp://{authority(host, between.port + 1)}"
        dist.init_process_group("hccl", init_method=store, rank=rank, world_size=2, timeout=timeout)
        device = NpuDevice()
        group = device.new_groups([(0, 1)], _STEP_S)[(0, 1)]
        connected = time.monotonic() - began
        sent, received = (device.allocate(2 << 20)[: 2 << 20] for _ in range(2))
        sent.view(2, -1).copy_(torch.tensor([[10 * rank + 1], [10 * rank + 2]], dtype=torch.uint8).npu())
        times = []
        for _ in range(_ECHOES):
            asked = time.monotonic()
            done = device.submit(lambda: device.all_to_all(received, sent, group), after=device.record_event())
            done.wait(_STEP_S)
            times.append(time.monotonic() - asked)
        wanted = torch.tensor([[rank + 1], [10 + rank + 1]], dtype=torch.uint8)
        if not bool(received.cpu().view(2, -1).eq(wanted).all()):
            yield error("peer.group", "an all-to-all with the other server gave wrong bytes", action)
            return
    except Exception as problem:  # noqa: BLE001 - torch_npu raises all kinds
        yield error(
            "peer.group", f"no group of ranks with {between.other}: {type(problem).__name__}: {problem}", action
        )
        return
    finally:
        wire.send("done")
    wire.receive(str)
    speed = (1 << 20) / max(min(times), 1e-9)
    found = f"a group with {between.other}: connected in {connected:.3g} s, all-to-all {speed / 1e9:.3g} GB/s"
    yield ok("peer.group", found, connect_seconds=round(connected, 3), bytes_per_second=round(speed))
