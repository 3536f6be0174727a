# SPDX-License-Identifier: Apache-2.0
"""The environment that vllm-ascend engines need on one machine with NPUs.

What the user has set already stays: these are the values that vllm-ascend's guides for prefill/decode
disaggregation start from, not the best ones for a certain machine.
"""

import dataclasses
import os
import socket
from collections.abc import Sequence
from importlib.util import find_spec

import psutil

from harness.engines import CPU_ENV, EngineConfig
from harness.prefork import METHOD

TRANSFER_TIMEOUT_MS = 10_000
DTYPE = "bfloat16"
"""An NPU's attention does not take float32."""
NO_NZ = '{"weight_nz_mode": 0}'
"""Weights stay in plain order: the emulated NPU does not know the chip's own formats."""


UNPINNED = (("CANN_ON_HOST_PINNED_ONLY", "0"),)
"""Environment of emulated NPUs where vLLM copies from memory that is not pinned: what it computes of images' sizes, and
which tokens a request allows."""

WITH_IMAGES = (*UNPINNED, (METHOD, "spawn"))
"""Environment of engines that load images. An engine core that is forked from its API server may be aborted at its
start: PyTorch says "Invalid thread pool!"."""


def problems() -> list[str]:
    """Returns what is missing to run on NPUs here, each with what to do; empty if nothing is."""
    found = []
    if not os.environ.get("ASCEND_HOME_PATH"):
        found.append("CANN's environment is not loaded: `source` set_env.sh of the toolkit, and of nnal/atb")
    for module, package in (
        ("torch_npu", "torch_npu"),
        ("vllm_ascend", "vllm-ascend"),
        ("mooncake", "mooncake-transfer-engine-npu"),
        ("vllm_ascend_pd", "vllm-ascend-pd (pip install --no-build-isolation -e '.[npu]')"),
    ):
        if find_spec(module) is None:
            found.append(f"{package} is not installed in this Python environment")
    return found


def engine_env(first_device: int, devices: int) -> dict[str, str]:
    """Returns the environment of an engine on `devices` NPUs, from the visible NPU number `first_device` on."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    available = visible.split(",") if visible else [str(i) for i in range(first_device + devices)]
    chosen = available[first_device : first_device + devices]
    if len(chosen) < devices:
        raise ValueError(f"needs {first_device + devices} NPUs, ASCEND_RT_VISIBLE_DEVICES has {len(available)}")
    interface, address = _network()
    defaults = {
        "VLLM_HOST_IP": address,
        "HCCL_IF_IP": address,
        "HCCL_SOCKET_IFNAME": interface,
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "ASCEND_CONNECT_TIMEOUT": str(TRANSFER_TIMEOUT_MS),
        "ASCEND_TRANSFER_TIMEOUT": str(TRANSFER_TIMEOUT_MS),
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
    kept = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return kept | {"ASCEND_RT_VISIBLE_DEVICES": ",".join(chosen)}


def first_devices(engines: Sequence[EngineConfig]) -> list[int]:
    """Returns the first NPU of each engine of one machine, so that no two engines share a card.

    Engines transfer between different NPUs only. The two NPUs of an Atlas A3 card have no link between them, so each
    engine begins at an even number.
    """
    firsts, free = [], 0
    for engine in engines:
        firsts.append(free)
        free += whole_cards(engine.tp * engine.pp * engine.dp)
    return firsts


def whole_cards(devices: int) -> int:
    """Returns the NPUs of the cards that `devices` need. A card has two on Atlas A3."""
    return devices + devices % 2


def emulated(config: EngineConfig, first_device: int = 0) -> EngineConfig:
    """Returns `config` for vllm-ascend on emulated NPUs, which are slow hosts: one thread each, loopback only."""
    env = {
        **CPU_ENV,
        "CANN_ON_HOST": "1",
        "TASK_QUEUE_ENABLE": "0",
        "HCCL_IF_IP": CPU_ENV["VLLM_HOST_IP"],
        "CANN_ON_HOST_FIRST_DEVICE": str(first_device),
    }
    return dataclasses.replace(
        config,
        device="npu",
        dtype=DTYPE,
        env=(*env.items(), *config.env),
        args=("--additional-config", NO_NZ, *config.args),
    )


def _network() -> tuple[str, str]:
    """Returns name and IPv4 address of the first interface that is up. Loopback counts only if there is no other."""
    states = psutil.net_if_stats()
    addresses = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and states[name].isup
    }
    return min(addresses.items(), key=lambda item: item[1].startswith("127."))
