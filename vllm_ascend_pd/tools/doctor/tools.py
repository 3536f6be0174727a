# SPDX-License-Identifier: Apache-2.0
"""Runs programs with a timeout and bounded output, and ends all processes that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import ByteReceiveStream, Process

MAX_OUTPUT_BYTES = 256 << 10
"""Maximum per stream of a program. `npu-smi info` prints about 10 KiB for 16 chips."""

_REAP_S = 5.0


@dataclass(frozen=True)
class Ran:
    """The output of a program.

    `problem` is why the output cannot be relied on, or None if the program ended by itself with code 0.
    """

    output: str
    errors: str
    problem: str | None = None

    @property
    def said(self) -> str:
        return f"{self.output}\n{self.errors}".strip()


@asynccontextmanager
async def running(
    command: Sequence[str], stdin: int = subprocess.DEVNULL, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Runs `command` in its own session. Its whole process group ends with the block. Raises OSError.

    `environment`: variables beside those of this process.
    """
    process = await anyio.open_process(
        list(command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Also if the leader has ended: its children may still run, and keep the group's number from being reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.move_on_after(_REAP_S, shield=True):
            await process.wait()
            await process.aclose()


async def read_bounded(stream: ByteReceiveStream | None, into: bytearray, limit: int = MAX_OUTPUT_BYTES) -> bool:
    """Reads `stream` to its end or to `limit`. Returns whether the end was reached."""
    assert stream is not None
    with contextlib.suppress(anyio.EndOfStream):
        while len(into) <= limit:
            into += await stream.receive()
        del into[limit:]
        return False
    return True


async def collect_last(stream: ByteReceiveStream | None, into: bytearray) -> None:
    """Reads everything and keeps the last part, so that a child never blocks on writing."""
    assert stream is not None
    async for piece in stream:
        into += piece
        del into[:-MAX_OUTPUT_BYTES]


async def run_tool(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Ran:
    """Runs `command` for at most `timeout_s` seconds. Does not raise if the program fails or is missing."""
    output, errors = bytearray(), bytearray()
    problem: str | None = None
    try:
        async with running(command, environment=environment) as process:
            whole: list[bool] = []

            async def read(stream: ByteReceiveStream | None, into: bytearray) -> None:
                whole.append(await read_bounded(stream, into))
                if not whole[-1]:
                    tasks.cancel_scope.cancel()

            with anyio.move_on_after(timeout_s) as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read, process.stdout, output)
                    tasks.start_soon(read, process.stderr, errors)
                if whole == [True, True]:
                    problem = _how_it_ended(await process.wait())
                else:
                    problem = f"printed more than {MAX_OUTPUT_BYTES >> 10} KiB and was stopped"
            if scope.cancelled_caught:
                problem = f"did not end within {timeout_s:g} s and was stopped"
    except OSError as failure:
        problem = f"cannot be started: {failure.strerror or failure}"
    return Ran(output.decode(errors="replace"), errors.decode(errors="replace"), problem)


def _how_it_ended(code: int) -> str | None:
    if code == 0:
        return None
    if code > 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
