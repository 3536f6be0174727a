# SPDX-License-Identifier: Apache-2.0
"""A real transfer between two of our transfer engines on this machine: Mooncake over TCP."""

from __future__ import annotations

import secrets
import subprocess

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.doctor import child
from vllm_ascend_pd.doctor.finding import Finding, error, ok
from vllm_ascend_pd.doctor.loopback_process import Checked, Ready, Sent
from vllm_ascend_pd.doctor.tools import MAX_OUTPUT_BYTES, run_tool, running

CHECK = "transfer.loopback"
TRANSFER_BYTES = 64 << 20
TIMEOUT_S = 90.0

_CHARS = 300
_ACTION = (
    "see that Mooncake can be loaded, that no MC_* variable is set by mistake, and that nothing filters connections of "
    "127.0.0.1 (with MC_USE_IPV6: of ::1) to itself"
)
_GONE = "the receiving process ended"


class _Failed(Exception):
    """Why there was no transfer."""


async def check(nbytes: int = TRANSFER_BYTES) -> list[Finding]:
    seed = str(secrets.randbits(63))
    errors = bytearray()
    try:
        with anyio.fail_after(TIMEOUT_S):
            return [await _transfer(seed, nbytes, errors)]
    except TimeoutError:
        reason = f"it did not end within {TIMEOUT_S:g} s"
    except (_Failed, OSError) as failure:
        reason = str(failure)
    last = one_line(bytes(errors[-_CHARS:]).decode(errors="replace"), _CHARS)
    return [error(CHECK, f"a transfer over TCP failed: {reason}" + (f" ({last})" if last else ""), _ACTION)]


async def _transfer(seed: str, nbytes: int, errors: bytearray) -> Finding:
    command = child.command("loopback_process", "receive", seed, str(nbytes))
    async with running(command, stdin=subprocess.PIPE) as receiver:
        outcome: Finding | _Failed
        async with anyio.create_task_group() as tasks:  # which would wrap what is raised in it
            tasks.start_soon(_collect, receiver.stderr, errors)
            try:
                outcome = await _exchange(receiver, seed, nbytes, errors)
            except _Failed as failure:
                outcome = failure
            tasks.cancel_scope.cancel()
    if isinstance(outcome, _Failed):
        raise outcome
    return outcome


async def _exchange(receiver: Process, seed: str, nbytes: int, errors: bytearray) -> Finding:
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    output = BufferedByteReceiveStream(receiver.stdout)
    ready = await _hear(output, Ready)
    ran = await run_tool(
        child.command("loopback_process", "send", seed, str(nbytes), ready.session, str(ready.address)), TIMEOUT_S
    )
    sent = child.lines(ran.output, Sent)
    if ran.problem is not None or not sent:
        errors += ran.errors.encode()
        raise _Failed(f"the sending process {ran.problem or 'said nothing'}")
    try:
        await receiver.stdin.send(b"look\n")
    except (anyio.BrokenResourceError, OSError):
        raise _Failed(_GONE) from None
    return judge(nbytes, sent[0], await _hear(output, Checked))


def judge(nbytes: int, sent: Sent, checked: Checked) -> Finding:
    if checked.wrong:
        found = (
            f"{checked.wrong} of {nbytes} bytes arrived wrong, the first at {checked.first}, and no error was reported"
        )
        return error(CHECK, found, "do not use this Mooncake: install the version that requirements/ names")
    speed = nbytes / max(sent.seconds, 1e-9)
    found = (
        f"{nbytes / 2**20:g} MiB in {sent.descriptors} pieces from one Mooncake engine to another over TCP, every byte "
        f"right: {speed / 1e9:.3g} GB/s"
    )
    return ok(CHECK, found, bytes=nbytes, seconds=round(sent.seconds, 6), bytes_per_second=round(speed))


async def _collect(stream: ByteReceiveStream | None, into: bytearray) -> None:
    """The last part of all that comes: a child must not wait for who reads it."""
    assert stream is not None
    async for piece in stream:
        into += piece
        del into[:-MAX_OUTPUT_BYTES]


async def _hear(output: BufferedByteReceiveStream, kind: type[child.Line]) -> child.Line:
    try:
        line = await output.receive_until(b"\n", MAX_OUTPUT_BYTES)
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError):
        raise _Failed(_GONE) from None
    return child.lines(line.decode() + "\n", kind)[0]
