# SPDX-License-Identifier: Apache-2.0
"""Runs a transfer between two transfer engines on this machine and compares every byte."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.tools.doctor.finding import Finding, Level, ok
from vllm_ascend_pd.tools.doctor.loopback_process import Checked, Ready, SendTiming, Task
from vllm_ascend_pd.tools.doctor.tools import MAX_OUTPUT_BYTES, collect_last, run_tool, running

TRANSFER_BYTES = 64 << 20
TIMEOUT_S = 90.0

_CHARS = 300
_GONE = "the receiving process ended"
_REPLACE = "do not use this Mooncake: install the version that requirements/ names"


@dataclass(frozen=True)
class Way:
    """A way for bytes from one process to another."""

    check: str
    """The name of the finding."""
    between: str
    """The way in words, for findings: from where to where, and over what."""
    action: str
    """What to do if a transfer fails."""
    protocol: str
    """Mooncake's protocol."""
    host: str
    """Address on which both engines listen."""
    source: int | None = None
    """The NPU whose memory is sent. None: host memory."""
    destination: int | None = None
    """The NPU whose memory is written to. None: host memory."""
    writes: int = 1
    """How often the bytes are sent, to measure the speed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of both processes, besides the doctor's."""
    failed: Level = Level.ERROR
    """The finding's level if the transfer fails."""


def over_tcp() -> Way:
    """Returns the way over TCP, from the host memory of one process to another's."""
    return Way(
        check="transfer.loopback",
        between="from one Mooncake engine to another over TCP",
        action="check that Mooncake can be loaded, that no MC_* variable is set by mistake, and that nothing filters "
        "connections from 127.0.0.1 to itself (with MC_USE_IPV6: ::1)",
        protocol="tcp",
        # With this variable, Mooncake does not support IPv4.
        host="::1" if "MC_USE_IPV6" in os.environ else "127.0.0.1",
    )


class _Failed(Exception):
    """The transfer did not happen. The text says why."""


async def check(way: Way, nbytes: int = TRANSFER_BYTES, timeout_s: float = TIMEOUT_S) -> Finding:
    task = Task(secrets.randbits(63), nbytes, way.host, way.protocol, writes=way.writes)
    errors = bytearray()
    try:
        with anyio.fail_after(timeout_s):
            return await _transfer(way, task, timeout_s, errors)
    except TimeoutError:
        reason = f"it did not end within {timeout_s:g} s"
    except (_Failed, OSError) as failure:
        reason = str(failure)
    last = one_line(bytes(errors[-_CHARS:]).decode(errors="replace"), _CHARS)
    found = f"a transfer {way.between} failed: {reason}" + (f" ({last})" if last else "")
    return Finding(way.check, way.failed, one_line(found, 1000), way.action)


async def _transfer(way: Way, task: Task, timeout_s: float, errors: bytearray) -> Finding:
    receive = msgspec.structs.replace(task, device=way.destination).argument()
    command = child.command("loopback_process", "receive", receive)
    async with running(command, stdin=subprocess.PIPE, environment=way.environment) as receiver:
        outcome: Finding | _Failed
        async with anyio.create_task_group() as tasks:  # it would wrap exceptions
            tasks.start_soon(collect_last, receiver.stderr, errors)
            try:
                outcome = await _exchange(receiver, way, task, timeout_s, errors)
            except _Failed as failure:
                outcome = failure
            tasks.cancel_scope.cancel()
    if isinstance(outcome, _Failed):
        raise outcome
    return outcome


async def _exchange(receiver: Process, way: Way, task: Task, timeout_s: float, errors: bytearray) -> Finding:
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    output = BufferedByteReceiveStream(receiver.stdout)
    ready = await _hear(output, Ready)
    send = msgspec.structs.replace(task, device=way.source).argument()
    command = child.command("loopback_process", "send", send, ready.session, str(ready.address))
    ran = await run_tool(command, timeout_s, way.environment)
    sent = child.lines(ran.output, SendTiming)
    if ran.problem is not None or not sent:
        errors += ran.errors.encode()
        raise _Failed(f"the sending process {ran.problem or 'said nothing'}")
    try:
        await receiver.stdin.send(b"look\n")
    except (anyio.BrokenResourceError, OSError):
        raise _Failed(_GONE) from None
    return judge(way, task, sent[0], await _hear(output, Checked))


def judge(way: Way, task: Task, sent: SendTiming, checked: Checked) -> Finding:
    if checked.wrong:
        found = (
            f"{checked.wrong} of {task.nbytes} bytes {way.between} arrived wrong, the first at {checked.first}, and no "
            "error was reported"
        )
        return Finding(way.check, Level.ERROR, found, _REPLACE)
    speed = task.nbytes * task.writes / max(sent.seconds, 1e-9)
    times = f"{task.writes} times " if task.writes > 1 else ""
    found = (
        f"{times}{task.nbytes / 2**20:g} MiB in {sent.descriptors} pieces {way.between}, every byte right: "
        f"{speed / 1e9:.3g} GB/s"
    )
    figures = {"bytes": task.nbytes * task.writes, "seconds": round(sent.seconds, 6), "bytes_per_second": round(speed)}
    return ok(way.check, found, **figures)


async def _hear(output: BufferedByteReceiveStream, kind: type[child.Line]) -> child.Line:
    try:
        line = await output.receive_until(b"\n", MAX_OUTPUT_BYTES)
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError):
        raise _Failed(_GONE) from None
    return child.lines(line.decode() + "\n", kind)[0]
