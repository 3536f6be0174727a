# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several real processes, one per rank: over HCCL each on its own NPU."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from harness.ports import release_port, reserve_port

Program = Callable[..., Any]

# Importing torch, torch_npu and the workers takes seconds: a server process does it once and every rank is forked from
# it. Preloaded is what is installed: the server of Python 3.11 does not look where pytest's `pythonpath` points, and
# would leave the imports to every rank without a word.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["vllm_ascend_pd.prefill.worker", "vllm_ascend_pd.decode.worker"])
_environment = dict(os.environ)
"""Before any test has changed it."""


def processes() -> multiprocessing.context.ForkServerContext:
    """Returns the context whose processes are forked from the server. An NPU's runtime has threads, which do not
    survive a fork: the server does not start it. Its environment has nothing that one test has set; a rank that needs
    its test's own gets it by `use_environment`."""
    with mock.patch.dict(os.environ, _environment, clear=True):
        multiprocessing.forkserver.ensure_running()
    return _forked


def use_environment(env: Mapping[str, str]) -> None:
    """Replaces the environment that this process has from the server."""
    os.environ.clear()
    os.environ.update(env)


class RankFailed(Exception):
    """What went wrong in which rank."""


def run_ranks(
    program: Program,
    size: int,
    *args: Any,
    backend: str = "hccl",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> list[Any]:
    """`program(rank, *args)` in `size` processes with a default process group over `backend`; what each returned.

    Raises `RankFailed` with the tracebacks of all ranks that raised, died or did not answer in time.
    """
    results = try_ranks(program, size, *args, backend=backend, env=env, timeout_s=timeout_s)
    failed = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, RankFailed)]
    if failed:
        raise RankFailed("\n".join(failed))
    return results


def try_ranks(
    program: Program,
    size: int,
    *args: Any,
    backend: str = "hccl",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> list[Any]:
    """As `run_ranks`, with a `RankFailed` in the place of what a failed rank would have returned."""
    port = reserve_port()
    context = processes()
    pipes, started = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, port, backend, {**os.environ, **(env or {})}, program, args)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append(process)
        return [_receive(pipe, timeout_s) for pipe in pipes]
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        release_port(port)


def _receive(pipe: Connection, timeout_s: float) -> Any:
    try:
        if not pipe.poll(timeout_s):
            return RankFailed(f"no answer within {timeout_s:g} s")
        ok, value = pipe.recv()
    except EOFError:
        return RankFailed("the process died")
    return value if ok else RankFailed(value)


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    backend: str,
    env: dict[str, str],
    program: Program,
    args: tuple[Any, ...],
) -> None:
    use_environment({**env, "GLOO_SOCKET_IFNAME": "lo"})
    faulthandler.enable()  # the emulated libraries abort where they cannot go on
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if backend == "hccl":
            torch.npu.set_device(rank)
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        pipe.send((True, program(rank, *args)))
    except BaseException:  # noqa: BLE001 - the test's process raises it
        pipe.send((False, traceback.format_exc()))
    if rank == 0:  # serves the store that the others meet through: they have all answered when the pipe is closed
        with contextlib.suppress(EOFError):
            pipe.recv()
    # Not the orderly end: after an injected fault it would wait for what never ends.
    pipe.close()
    os._exit(0)
