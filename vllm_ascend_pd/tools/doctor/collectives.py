# SPDX-License-Identifier: Apache-2.0
"""Runs the connector's all-to-all beside a model's all-reduce on several NPUs: checks results, deadlocks and speed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.tools.doctor.finding import Finding, error, ok
from vllm_ascend_pd.tools.doctor.tools import MAX_OUTPUT_BYTES, collect_last, running

CHECK = "hardware.collectives"
MAX_RANKS = 8
LAYERS = 8
"""Layers of a round. Each has two all-reduces and one all-to-all."""

STAGES = ("the model's group", "the connector's group", "all-reduce", "all-to-all", "all-to-all beside all-reduce")
"""Stages in their order. A rank reports each one that it has passed."""

_MODE = "HCCL_OP_EXPANSION_MODE"
_PRESET_MODE = "AIV"
"""The value of tools/launch/node.py for engines: the model's collectives run on vector cores."""

_GRACE_S = 3.0  # for the reports of other ranks after one has failed
_CHARS = 300
_CONNECT = (
    "check that no other process holds these NPUs, and that HCCL_IF_IP and HCCL_SOCKET_IFNAME, if set, name this "
    "host's interface; plog in ~/ascend/log says why HCCL failed"
)
_TOGETHER = (
    f"unset {_MODE} for prefill engines with tensor parallelism, or set it to HOST (A2) or AI_CPU (A3), try again, and "
    "send us this report"
)
_WRONG = "do not run prefill with tensor parallelism on these versions, and send us this report"


class Reached(msgspec.Struct, frozen=True):
    """The stage that a rank has passed, or where it failed."""

    stage: str
    seconds: float = 0.0
    """Seconds for connecting, or for the shortest round."""
    num_bytes: int = 0
    """Bytes of memory that connecting took, or that a rank sends to others in a round."""
    rounds: int = 1
    problem: str = ""
    """The error, or ""."""


class RankReport:
    """The reports of one rank's process."""

    def __init__(self) -> None:
        self.reached: list[Reached] = []
        self.errors = bytearray()

    @property
    def next_stage(self) -> str:
        return STAGES[len(self.reached)] if len(self.reached) < len(STAGES) else "its end"

    @property
    def problem(self) -> str:
        return next((each.problem for each in self.reached if each.problem), "")


async def check(size: int, timeout_s: float) -> Finding:
    """Runs `size` ranks on the first NPUs."""
    ranks = [RankReport() for _ in range(size)]
    mode = os.environ.get(_MODE) or _PRESET_MODE
    with tempfile.TemporaryDirectory(prefix="pd-doctor-") as folder:
        arguments = [str(size), str(Path(folder, "store"))]
        commands = [child.command("collectives_process", str(rank), *arguments) for rank in range(size)]
        with anyio.move_on_after(timeout_s) as scope:
            async with anyio.create_task_group() as tasks:

                async def follow(rank: int) -> None:
                    await _follow(commands[rank], {_MODE: mode}, ranks[rank])
                    if ranks[rank].problem or len(ranks[rank].reached) < len(STAGES):
                        await anyio.sleep(_GRACE_S)
                        tasks.cancel_scope.cancel()

                for rank in range(size):
                    tasks.start_soon(follow, rank)
    return judge(ranks, mode, f"did not end within {timeout_s:g} s" if scope.cancelled_caught else "")


async def _follow(command: Sequence[str], environment: dict[str, str], rank: RankReport) -> None:
    """Waits until the rank's process ends or reports a failure."""
    async with running(command, environment=environment) as process:
        assert process.stdout is not None
        output = BufferedByteReceiveStream(process.stdout)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect_last, process.stderr, rank.errors)
            try:
                while not rank.problem:
                    line = await output.receive_until(b"\n", MAX_OUTPUT_BYTES)
                    rank.reached += child.lines(line.decode() + "\n", Reached)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError):
                pass
            tasks.cancel_scope.cancel()


def judge(ranks: Sequence[RankReport], mode: str, timed_out: str) -> Finding:
    """Judges the ranks' reports. `timed_out`: that ranks did not end in time, in words; "" if all did."""
    for number, rank in enumerate(ranks):
        if rank.problem:
            stage = rank.reached[-1].stage
            return _failed(stage, f"rank {number}: {rank.problem}", mode)
    behind = min(ranks, key=lambda rank: len(rank.reached))
    if timed_out or len(behind.reached) < len(STAGES):
        places = ", ".join(f"rank {number} at {rank.next_stage}" for number, rank in enumerate(ranks))
        last = one_line(bytes(behind.errors[-_CHARS:]).decode(errors="replace"), _CHARS)
        reason = timed_out or f"the process of rank {ranks.index(behind)} ended"
        return _failed(behind.next_stage, f"{reason}; {places}" + (f" ({last})" if last else ""), mode)
    stages = zip(*(rank.reached for rank in ranks), strict=True)
    _, group, reduce, exchange, both = (max(stage, key=lambda reached: reached.seconds) for stage in stages)
    alone, beside = (each.num_bytes / max(each.seconds, 1e-9) for each in (exchange, both))
    found = (
        f"{len(ranks)} ranks, {both.rounds} rounds of {LAYERS} layers, all results right with {_MODE}={mode} for the "
        f"model: all-to-all {alone / 1e9:.3g} GB/s a rank, {beside / 1e9:.3g} beside all-reduce; a layer's all-reduces "
        f"{reduce.seconds / LAYERS * 1e3:.3g} ms, {both.seconds / LAYERS * 1e3:.3g} with all-to-all; the connector's "
        f"group takes {group.num_bytes / 2**20:.0f} MiB"
    )
    return ok(
        CHECK,
        found,
        ranks=len(ranks),
        rounds=both.rounds,
        mode=mode,
        all_to_all_bytes_per_second=round(alone),
        all_to_all_beside_bytes_per_second=round(beside),
        all_reduce_seconds=round(reduce.seconds / LAYERS, 6),
        both_seconds=round(both.seconds / LAYERS, 6),
        group_bytes=group.num_bytes,
        connect_seconds=round(group.seconds, 3),
    )


def _failed(stage: str, reason: str, mode: str) -> Finding:
    action = _WRONG if "are wrong" in reason else _TOGETHER if stage == STAGES[-1] else _CONNECT
    return error(CHECK, f"{stage} failed, with {_MODE}={mode} for the model: {reason}", action, stage=stage)
