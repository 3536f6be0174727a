# SPDX-License-Identifier: Apache-2.0
"""Processes that run ranks for tests: one rank at a time and reused, or a function in several at once."""

import atexit
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness.ports import release_port, reserve_port

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


class Rank:
    """A rank's process, driven by calls: `rank.call("name", ...)` runs the method of its program and returns.

    Processes are reused: starting one on an NPU means initialising it.
    """

    def __init__(self, program: Callable[..., Any], *args: Any, device: str, kernels: Path | None = None) -> None:
        """`kernels`: a library with the NPU's regroup ops, in place of those installed."""
        self._host = _hosts.acquire(device, kernels)
        self._reusable = True
        self.send("load", program, args)

    def send(self, name: str, *args: Any) -> None:
        self._host.pipe.send((name, args))

    def receive(self, timeout_s: float = 120.0) -> Any:
        if not self._host.pipe.poll(timeout_s):
            self._reusable = False
            raise TimeoutError("the rank did not answer")
        try:
            ok, value = self._host.pipe.recv()
        except EOFError:
            self._reusable = False
            raise RuntimeError("the rank's process died") from None
        if not ok:
            raise RuntimeError(f"in the rank's process: {value}")
        return value

    def call(self, name: str, *args: Any) -> Any:
        self.send(name, *args)
        return self.receive()

    def retire(self) -> None:
        """Its process is not to be used again: a stream on its device has failed, say."""
        self._reusable = False

    def kill(self) -> None:
        """SIGKILL, whatever it is doing."""
        self._reusable = False
        self._host.end()

    def freeze(self, frozen: bool = True) -> None:
        """Sends SIGSTOP or SIGCONT. Its threads stand still, and its connections stay."""
        assert self._host.process.pid is not None
        if frozen:
            stop(self._host.process.pid)
        else:
            os.kill(self._host.process.pid, signal.SIGCONT)

    def dies(self, timeout_s: float) -> bool:
        """Whether its process ends by itself, sooner or later."""
        self._host.process.join(timeout_s)
        return not self._host.process.is_alive()

    def stop(self) -> None:
        """Begins to end the rank, see `stopped`."""
        self.send("stop", self._reusable)

    def stopped(self) -> list[str]:
        """Waits until the rank has ended, after `stop`. Returns what it could not clean up itself."""
        left: list[str] = []
        try:
            left = self.receive()
        except (OSError, RuntimeError, TimeoutError) as error:
            self._reusable = False
            left.append(f"did not stop: {error}")
        if self._reusable:
            _hosts.release(self._host)
        else:
            self._host.end()
        return left


class _Host:
    """A process that runs one rank at a time."""

    def __init__(self, device: str, kernels: Path | None) -> None:
        context = processes()
        self.settings = _settings(device, kernels)
        self.pipe, child = context.Pipe()
        self._temporary = tempfile.TemporaryDirectory(prefix="pd-rank-")
        arguments = (child, kernels, self._temporary.name, dict(os.environ))
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        child.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()
        self._temporary.cleanup()


class _Hosts:
    """Idle processes, all started with the same settings: those of others end when settings change."""

    def __init__(self) -> None:
        self._idle: list[_Host] = []
        atexit.register(self.close)

    def acquire(self, device: str, kernels: Path | None) -> _Host:
        for host in [h for h in self._idle if h.settings != _settings(device, kernels)]:
            self._idle.remove(host)
            host.end()
        return self._idle.pop() if self._idle else _Host(device, kernels)

    def release(self, host: _Host) -> None:
        self._idle.append(host)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


def _settings(device: str, kernels: Path | None) -> tuple[object, ...]:
    """Returns the settings that a process reads only when it starts."""
    return (
        device,
        kernels,
        tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(("CANN_ON_HOST", "HCCL_", "TORCH_HCCL")))),
    )


_hosts = _Hosts()


def start_afresh() -> None:
    """Ranks started from now on get new processes: a transfer engine's timeouts last as long as its process."""
    _hosts.close()


def stop(pid: int) -> None:
    """SIGSTOP; returns when all threads stand still, which takes a moment where cores are few."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30.0
    while not all(_state(task) in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.005)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return "X"


def _serve(pipe: Connection, kernels: Path | None, temporary: str, env: dict[str, str]) -> None:
    use_environment(env)
    faulthandler.enable()  # the emulated libraries abort where they cannot go on
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["VLLM_RPC_BASE_PATH"] = temporary  # of the sockets between vLLM's ranks, which it leaves
    torch.set_num_threads(1)
    if kernels is not None:
        _use_kernels(kernels)
    rank: Any = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        if name == "load":
            program, program_arguments = arguments
            rank = _answer(pipe, functools.partial(program, *program_arguments), keep=True)
        else:
            _answer(pipe, functools.partial(getattr(rank, name), *arguments))


def _use_kernels(library: Path) -> None:
    from vllm_ascend_pd.device import ops, ops_fallback

    assert ops_fallback._library is not None, f"{ops.NPU_LIBRARY} is in use already"
    ops_fallback._library._destroy()
    torch.ops.load_library(library)


def _answer(pipe: Connection, action: Callable[[], Any], keep: bool = False) -> Any:
    """Sends (True, what `action` returned) or (False, its traceback); with `keep`, keeps the value here."""
    try:
        value = action()
    except Exception:  # noqa: BLE001 - the caller raises it in the test's process
        pipe.send((False, traceback.format_exc()))
        return None
    pipe.send((True, None if keep else value))
    return value


class _Grouped:
    """A rank of a default process group, over HCCL on an NPU of its own."""

    def __init__(self, rank: int, size: int, port: int, backend: str) -> None:
        self._rank = rank
        if backend == "hccl":
            torch.npu.set_device(rank)
        init = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group(backend, init_method=init, rank=rank, world_size=size)

    def run(self, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return program(self._rank, *args)


def run_ranks(
    program: Callable[..., Any],
    size: int,
    *args: Any,
    backend: str = "hccl",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Returns what `program(rank, *args)` returned in each of `size` processes. Raises what `Rank.receive` raises."""
    port, ranks = reserve_port(), []
    try:
        with mock.patch.dict(os.environ, env or {}):
            for rank in range(size):
                ranks.append(Rank(_Grouped, rank, size, port, backend, device=backend))
        for each in ranks:
            each.receive(timeout_s)
            each.send("run", program, args)
        return [each.receive(timeout_s) for each in ranks]
    finally:
        # Not the orderly end: after an injected fault it would wait for what never ends.
        for each in ranks:
            each.kill()
        release_port(port)
