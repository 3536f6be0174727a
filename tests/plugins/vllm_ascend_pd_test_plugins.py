# SPDX-License-Identifier: Apache-2.0
"""vLLM plugins that only the tests use: with this folder on PYTHONPATH, vLLM loads them in every process.

Each is off unless its environment variable is set, so the folder alone changes nothing.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TOKEN_MAJOR = "VLLM_ASCEND_PD_TEST_TOKEN_MAJOR"
"""The KV cache in vllm-ascend's token-major order, read and written by `token_major.py`."""

SHORT_SPIN = "VLLM_ASCEND_PD_TEST_SHORT_SPIN"
"""Idle workers sleep after 10 ms without work. vLLM lets them poll for 1 s, which suits a machine with a
core per worker; where several engines share two cores, the idle ones take those from the busy ones."""

HOLD_PORTS = "VLLM_ASCEND_PD_TEST_HOLD_PORTS"
"""Ports that vLLM looks for come from `harness.ports`. vLLM lets the kernel name one, closes it, and listens there
seconds later: of all sockets that processes beside it bind meanwhile, one may have got the same port."""

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's own. "fork" holds on vLLM's CPU platform, too, which has engine cores and workers spawned whatever is set:
each then imports vLLM anew, 10 s of a core. Nor is it imported anew to look at a model's class."""

POISON_TOKENS = "VLLM_ASCEND_PD_TEST_POISON_TOKENS"
"""A number: prompts of that many tokens cannot be sent by prefill, see `faults.py`. Unset: no faults."""

LOSE_TENSORS_FROM = "VLLM_ASCEND_PD_TEST_LOSE_TENSORS_FROM"
"""A number: prompts of that many tokens lose the first tensor on their way, of one more the second, ..."""

SAY_SAVED = "VLLM_ASCEND_PD_TEST_SAY_SAVED"
"""Prefill says how many layers each step saved, see `hooks_seen.py`."""

SOCKS = "VLLM_ASCEND_PD_TEST_SOCKS"
"""`host:port` of a SOCKS5 proxy that side channels connect through."""

ACCELERATOR_0 = "VLLM_ASCEND_PD_TEST_ACCELERATOR_0"
"""Who asks torch for the number of the current accelerator gets 0, where torch has none and would raise: vLLM's
MooncakeConnector asks, and runs on a CPU with that."""

DRAFTS = "VLLM_ASCEND_PD_TEST_DRAFTS"
"""vLLM 0.30's CPU backend has kernels of its own for drafts, but starts Triton's, see `without_triton.py`."""

FLOAT32_STATES = "VLLM_ASCEND_PD_TEST_FLOAT32_STATES"
"""vLLM 0.30's CPU backend packs the weights of convolutions for kernels that take bfloat16 alone. Layers of float32 do
not use these kernels, and cannot be packed."""

WITHOUT_TRITON = "VLLM_ASCEND_PD_TEST_WITHOUT_TRITON"
"""DeepSeek V4 runs on vLLM's CPU backend, which needs Triton for it, see `without_triton.py`."""

INSTALLED_KERNELS = "VLLM_ASCEND_PD_TEST_INSTALLED_KERNELS"
"""vLLM 0.23 runs with what is compiled of the installed vLLM, see `older_vllm.py`."""

FIXED = "VLLM_ASCEND_PD_TEST_FIXED"
"""JSON: fields of `ConnectorConfig` that users cannot set, with other values than theirs."""

FAIL_LOADS = "VLLM_ASCEND_PD_TEST_FAIL_LOADS"
"""A file that names blocks which AscendStore fails to load, see `failing_loads.py`."""

BLOCKS_IN_USE = "VLLM_ASCEND_PD_TEST_BLOCKS_IN_USE"
"""A folder: engines write there how many KV blocks requests have, see `blocks_in_use.py`."""

CONTROL = "VLLM_ASCEND_PD_TEST_CONTROL"
"""A folder: every process listens there, see `remote_control.py`. With it:"""
SESSION = "VLLM_ASCEND_PD_TEST_SESSION"
"""`host:port` that is published instead of the transfer engine's session;"""
REFUSE_MEMORY = "VLLM_ASCEND_PD_TEST_REFUSE_MEMORY"
"""the transfer engine registers no memory."""


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    if os.environ.get(TOKEN_MAJOR) == "1":
        _use_token_major_cache()
    if os.environ.get(SHORT_SPIN) == "1":
        _shorten_spin(seconds=0.01)
    if os.environ.get(HOLD_PORTS) == "1":
        _hold_ports()
    if os.environ.get(METHOD) == "fork":
        _fork_on_cpu()
    if METHOD in os.environ:
        _inspect_models_here()
    if tokens := os.environ.get(POISON_TOKENS):
        from faults import poison_prompts_of

        poison_prompts_of(int(tokens))
    if tokens := os.environ.get(LOSE_TENSORS_FROM):
        from faults import lose_tensors_of_prompts_from

        lose_tensors_of_prompts_from(int(tokens))
    if os.environ.get(SAY_SAVED) == "1":
        from hooks_seen import say_what_was_saved

        say_what_was_saved()
    if proxy := os.environ.get(SOCKS):
        _connect_through(proxy)
    if os.environ.get(ACCELERATOR_0) == "1":
        _call_the_cpu_accelerator_0()
    if os.environ.get(WITHOUT_TRITON) == "1":
        from without_triton import replace_kernels

        replace_kernels()
    if os.environ.get(DRAFTS) == "1":
        from without_triton import replace_kernels_of_drafts

        replace_kernels_of_drafts()
    if os.environ.get(FLOAT32_STATES) == "1":
        _leave_convolutions_unpacked()
    if os.environ.get(INSTALLED_KERNELS) == "1":
        from older_vllm import use_installed_kernels

        use_installed_kernels()
    if fixed := os.environ.get(FIXED):
        change_fixed(json.loads(fixed))
    if file := os.environ.get(FAIL_LOADS):
        from failing_loads import fail_loads

        fail_loads(Path(file))
    if folder := os.environ.get(BLOCKS_IN_USE):
        from blocks_in_use import write_down

        write_down(Path(folder))
    if folder := os.environ.get(CONTROL):
        from remote_control import listen

        listen(Path(folder), os.environ.get(SESSION, ""), os.environ.get(REFUSE_MEMORY) == "1")


def _leave_convolutions_unpacked() -> None:
    from vllm import _custom_ops

    pack = _custom_ops.causal_conv1d_weight_pack
    _custom_ops.causal_conv1d_weight_pack = lambda w: w.unsqueeze(1) if w.dtype.itemsize == 4 else pack(w)


def _use_token_major_cache() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "token_major.TokenMajorBackend")


def _shorten_spin(seconds: float) -> None:
    import functools

    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition = functools.partial(shm_broadcast.SpinCondition, busy_loop_s=seconds)


def _find_harness() -> None:
    tests = str(Path(__file__).resolve().parents[1])
    if tests not in sys.path:
        sys.path.append(tests)


def _inspect_models_here() -> None:
    _find_harness()
    from harness.models import inspect_here

    inspect_here()


def _hold_ports() -> None:
    from vllm.utils import network_utils

    _find_harness()
    from harness.ports import reserve_port

    def reserve(start_port: int | None = None, max_attempts: int | None = None) -> int:
        return reserve_port()

    network_utils._get_open_port = reserve


def _fork_on_cpu() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: "VllmConfig") -> None:
        check(config)
        os.environ[METHOD] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)  # type: ignore[method-assign]


def _connect_through(proxy: str) -> None:
    import zmq

    from vllm_ascend_pd.transport import loop

    make = loop.Loop._socket

    def make_proxied(self: loop.Loop, kind: int) -> "zmq.Socket[bytes]":
        socket = make(self, kind)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.SOCKS_PROXY, proxy.encode())
        return socket

    loop.Loop._socket = make_proxied  # type: ignore[method-assign]


def change_fixed(values: dict[str, float]) -> None:
    """Changes what users cannot set, in every engine that this process builds from now on."""
    import msgspec

    from vllm_ascend_pd.connector import setup
    from vllm_ascend_pd.core.config import ConnectorConfig, parse_config

    def parse_and_change(extra: dict[str, Any]) -> ConnectorConfig:
        return msgspec.structs.replace(parse_config(extra), **values)

    setup.parse_config = parse_and_change


def _call_the_cpu_accelerator_0() -> None:
    import torch

    torch.accelerator.current_device_index = lambda: 0
