# SPDX-License-Identifier: Apache-2.0
"""What CANN's libraries and Mooncake's protocol `ascend` take: memory regions, HCCL communicators and ports. Pure.

Where the limits are from:

- 256 regions: HCCL, global_mem_manager.h (`MAX_GLOBAL_MEM_REG_COUNT`), for all engines of a process. Later versions
  have no such limit there; HIXL itself takes 4096 (mem_msg_handler.cc). vllm-ascend 0.23 refuses more than 256.
- 50 GB of device memory on Atlas A2 and A3: HIXL's guide, docs/zh/api/cpp/HIXL-interface.md of 9.2.0-beta.2,
  restrictions of `RegisterMem`. Neither HIXL's code nor vllm-ascend's connectors check it.
- 2 MiB alignment of device memory: Mooncake's guide to its Ascend transport, for HCCS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Region: TypeAlias = tuple[int, int]
"""Address and bytes."""

ALIGNMENT = 2 << 20
"""A region of device memory begins at a multiple of this many bytes."""

MAX_REGIONS = 256
"""Regions that one process may register."""

DOCUMENTED_DEVICE_BYTES = 50 << 30
"""Bytes of device memory that one process may register on Atlas A2 and A3, by HIXL's guide."""

_A2_AND_A3 = ("Ascend910B", "Ascend910_93")

_BASE_PORT = 20000
_PORTS = 100
"""Mooncake, ascend_direct_transport/utils.cpp (`FindAdxlListenPort`): an NPU's listener takes any free port of
base + 100 * its physical number to base + 100 * (that + 1), both included."""


def merge(regions: Iterable[Region], gap: int = -1) -> list[Region]:
    """Returns sorted, disjoint regions that cover `regions`.

    Regions that overlap become one. So do regions with at most `gap` bytes between them: 0 merges adjacent regions.
    Raises ValueError for a region without bytes.
    """
    merged: list[Region] = []
    for address, size in sorted(regions):
        if size <= 0:
            raise ValueError(f"region at {address:#x} has {size} bytes")
        if merged and address <= sum(merged[-1]) + gap:
            begin, length = merged[-1]
            merged[-1] = (begin, max(length, address + size - begin))
        else:
            merged.append((address, size))
    return merged


def aligned(region: Region, storage: int) -> Region:
    """Returns the region from the multiple of `ALIGNMENT` before it on, unless that is before its storage begins.

    In models that also have states, vllm-ascend puts K behind the convolutions' states, even for a layer that shares
    its tensor with none, such as an MTP layer: K then begins anywhere in a tensor that itself begins at a multiple
    (model_runner_v1.py, `_reshape_kv_cache_tensors`).
    """
    address, size = region
    before = address % ALIGNMENT
    return region if address - before < storage else (address - before, size + before)


def covered(region: Region, known: Iterable[Region]) -> bool:
    """Returns whether one of `known` contains the region."""
    address, size = region
    return any(begin <= address and address + size <= begin + length for begin, length in known)


def refusal(regions: Sequence[Region], chip: str) -> str | None:
    """Returns why a process cannot register `regions`, which are all that it registers; None if it can.

    `chip`: the chip's name as ACL returns it, such as "Ascend910B1".
    """
    for address, size in regions:
        if address % ALIGNMENT:
            return (
                f"the region {address:#x}+{size} does not begin at a multiple of 2 MiB, which HCCS needs: allocate KV "
                "caches as vllm-ascend does with a kv_transfer_config"
            )
    if len(regions) > MAX_REGIONS:
        return (
            f"{len(regions)} regions of memory, and HCCL takes {MAX_REGIONS} for each process: spread the model's "
            "layers over more ranks (--pipeline-parallel-size), or use a model with fewer KV cache tensors"
        )
    return None


def doubt(regions: Sequence[Region], chip: str) -> str | None:
    """Returns why it is not known whether a process can register `regions`; None if nothing speaks against it."""
    total = sum(size for _, size in regions)
    if not chip.startswith(_A2_AND_A3) or total <= DOCUMENTED_DEVICE_BYTES:
        return None
    return (
        f"{total >> 20} MiB of device memory are registered. HIXL's guide (HIXL-interface.md, RegisterMem) documents "
        f"{DOCUMENTED_DEVICE_BYTES >> 20} MiB a process for {chip}, which HIXL does not check. If transfers fail, make "
        "the KV cache smaller (--kv-cache-memory-bytes); `vllm-ascend-pd doctor --hardware` tries it"
    )


# The HCCL communicators that prefill ranks exchange heads in: how HCCL runs them, and the memory they take.

BUFFER_MB = 16
"""Of a communicator: about what a rank exchanges of one layer in a step. HCCL cuts what is larger into several rounds.
HCCL_BUFFSIZE, 200 MB by default, sizes the model's own communicators."""

_HOST, _AI_CPU = 1, 2
"""HCCL's values of `hcclOpExpansionMode` (its documentation of `HcclCommConfig`)."""


def hccl_config(ranks: Sequence[int], chip: str) -> dict[str, int | str]:
    """torch_npu's `ProcessGroupHCCL.Options.hccl_config` for a group of these global ranks on the chip of that name.

    The expansion mode is the chip's own default, which HCCL_OP_EXPANSION_MODE replaces in all other groups. That may be
    AIV. HCCL does not support two AIV communicators at a time, and this one runs beside the model's.
    On Atlas A2 the mode is HOST, because HCCL before CANN 9.1 ignores AI_CPU there. Elsewhere it is AI_CPU, because
    Atlas A3 has no HOST.
    """
    return {
        "hccl_op_expansion_mode": _HOST if chip.startswith("Ascend910B") else _AI_CPU,
        "hccl_buffer_size": BUFFER_MB,
        "group_name": f"pd-regroup-{ranks[0]}-{ranks[-1]}",  # at most 32 characters; errors of HCCL name it
    }


def communicator_bytes(groups: int) -> int:
    """Returns the NPU memory of a rank's communicators in that many groups: each has a send and a receive buffer."""
    return groups * 2 * BUFFER_MB * 1024 * 1024


def ascend_ports(devices: Iterable[int], environment: Mapping[str, str]) -> dict[int, range]:
    """Returns by device the ports among which Mooncake's protocol `ascend` chooses a free one."""
    preset = environment.get("ASCEND_BASE_PORT", "")
    base = int(preset) if re.fullmatch("[0-9]{1,5}", preset) else _BASE_PORT
    return {n: range(base + _PORTS * n, base + _PORTS * (n + 1) + 1) for n in devices}
