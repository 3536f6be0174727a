# SPDX-License-Identifier: Apache-2.0
"""The steps of `vllm-ascend-pd doctor --hardware`: kernels, writes and collectives on this machine's NPUs.

Each step runs in child processes with a time limit (`on_npu.py`, `loopback.py`). This module never imports torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_pd.core.ascend import DOCUMENTED_DEVICE_BYTES
from vllm_ascend_pd.tools.doctor import loopback
from vllm_ascend_pd.tools.doctor.loopback import DESCRIPTOR_BYTES, WRITE, Way
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, note, progress
from vllm_ascend_pd.tools.programs import Ran, child, run, run_all

STEP_TIMEOUT_S = 180.0
"""A step takes some seconds on NPUs, and more where processes share cores."""

MAX_RANKS = 8

_TIMEOUTS = {"ASCEND_CONNECT_TIMEOUT": "10000", "ASCEND_TRANSFER_TIMEOUT": "10000"}
"""Milliseconds. Both of Mooncake's attempts end within a step, so that the finding has Mooncake's reason."""
_OVER_ROCE = {"HCCL_INTRA_ROCE_ENABLE": "1", "HCCL_INTRA_PCIE_ENABLE": "0"}

_LINK = (
    "see the findings of hccn.* above, and that no other process holds these NPUs. Of A2 servers only 800I A2 and "
    "A200I A2 Box copy over HCCS: on others set HCCL_INTRA_ROCE_ENABLE=1 and HCCL_INTRA_PCIE_ENABLE=0 on both sides "
    "(docs/npu.md). With ASCEND_GLOBAL_LOG_LEVEL=1, plog in ~/ascend/log says why HIXL failed"
)
_ROCE = (
    "prefill and decode on different servers need RoCE: give each NPU an address (hccn_tool -i N -ip -s ...), connect "
    "its port, and mount /etc/hccn.conf into containers"
)


def check(npus: Sequence[str], host: str) -> list[Finding]:
    """Runs the steps one after the other.

    npus: the machine's numbers of the NPUs that processes see, in their order; "?" if ACL does not tell a number.
    host: where engines listen.
    """
    name = "hardware.devices"
    if not npus:
        action = (
            "run it on a machine with NPUs, in the engines' environment (requirements/npu.txt), and see the findings "
            "of npu.* and loading.torch_npu above; in a container, pass /dev/davinci<N> of two NPUs or more"
        )
        return [error(name, "torch_npu is not installed or finds no NPU: no step of --hardware can run", action)]
    progress("running the block ops on an NPU")
    findings = check_kernels()
    if len(npus) < 2:
        left_out = "one NPU: writes between NPUs and collectives are left out"
        return [note(name, left_out, "run this with two NPUs or more"), *findings]
    for way in ways(npus, host):
        progress(f"writing {way.between}")
        findings += loopback.check(way, STEP_TIMEOUT_S)
    progress(f"writing to the end of a region of {LARGE_REGION_BYTES / 2**30:.3g} GiB")
    findings += loopback.check(large_region(npus, host), STEP_TIMEOUT_S)
    size = min(len(npus), MAX_RANKS)
    progress(f"exchanging between {size} NPUs")
    return [*findings, check_collectives(size)]


def ways(npus: Sequence[str], host: str) -> list[Way]:
    """Returns transfers from the first NPU to its neighbour and to the last NPU, and back over RoCE.

    What descriptors take is measured once inside the server and once over RoCE.
    """
    last = len(npus) - 1
    pairs = [(0, 1, False), *([(0, last, False)] if last > 1 else []), (last, 0, True)]
    return [
        Way(
            check=f"{WRITE}{'roce' if roce else 'ascend'}.{npus[source]}-{npus[destination]}",
            between=f"from NPU {npus[source]} to NPU {npus[destination]} by ascend" + (" over RoCE" if roce else ""),
            action=_ROCE if roce else _LINK,
            protocol="ascend",
            host=host,
            source=source,
            destination=destination,
            descriptor_bytes=DESCRIPTOR_BYTES if 1 in (destination, roce) else (),
            environment={**_TIMEOUTS, **(_OVER_ROCE if roce else {})},
            failed=Level.WARNING if roce else Level.ERROR,
        )
        for source, destination, roce in pairs
    ]


WITHOUT_KERNELS = "try again without vllm_ascend_pd/libvllm_ascend_pd_npu.so where it exists, and send us both reports"


def check_kernels(timeout_s: float = STEP_TIMEOUT_S) -> list[Finding]:
    """Returns whether the ops are right, how fast each is, and what int32 `Mul` keeps."""
    ran = run(child(f"{__package__}.on_npu", "kernels"), timeout_s)
    findings = ran.reports(Finding)
    if ran.problem is None and findings:
        return findings
    return [*findings, error("hardware.kernels", ran.ending, WITHOUT_KERNELS)]


LARGE_REGION_BYTES = DOCUMENTED_DEVICE_BYTES + (2 << 20)
"""A region above the size that HIXL's guide documents, and does not check."""


def large_region(npus: Sequence[str], host: str) -> Way:
    """Returns a transfer to the end of a region that is larger than HIXL documents."""
    return Way(
        check="hardware.large_region",
        between=f"from NPU {npus[0]} to the end of a region of {LARGE_REGION_BYTES >> 20} MiB on NPU {npus[1]}",
        action=f"keep KV cache and staging buffer below {DOCUMENTED_DEVICE_BYTES >> 30} GiB "
        "(--kv-cache-memory-bytes), if the NPU has that much memory free; and send us this report",
        protocol="ascend",
        host=host,
        source=0,
        destination=1,
        num_bytes=1 << 20,
        room_before=LARGE_REGION_BYTES - (1 << 20),
        environment=_TIMEOUTS,
        failed=Level.WARNING,
    )


# The connector's all-to-all beside a model's all-reduce: results, deadlocks and speed.

STAGES = ("the model's group", "the connector's group", "all-to-all beside all-reduce")
"""Stages in their order. A rank reports a finding for each: that it has passed it, or an error."""

MODE = "HCCL_OP_EXPANSION_MODE"

_GRACE_S = 3.0  # for the reports of other ranks after one has failed
_CONNECT = (
    "check that no other process holds these NPUs, and that HCCL_IF_IP and HCCL_SOCKET_IFNAME, if set, name this "
    "host's interface; plog in ~/ascend/log says why HCCL failed"
)
_TOGETHER = (
    f"unset {MODE} for prefill engines with tensor parallelism, or set it to HOST (A2) or AI_CPU (A3), try again, and "
    "send us this report"
)


def check_collectives(size: int, timeout_s: float = STEP_TIMEOUT_S) -> Finding:
    """Runs `size` ranks on the first NPUs."""
    mode = os.environ.get(MODE, "")
    with tempfile.TemporaryDirectory(prefix="pd-doctor-") as folder:
        store = str(Path(folder, "store"))
        commands = [child(f"{__package__}.on_npu", "rank", str(rank), str(size), store) for rank in range(size)]
        return judge_collectives(run_all(commands, timeout_s, grace_s=_GRACE_S), mode)


def judge_collectives(ranks: Sequence[Ran], mode: str) -> Finding:
    """Returns the first rank's last report, or what has failed."""
    reached = [rank.reports(Finding) for rank in ranks]
    failed = next((each for reports in reached for each in reports if each.level is Level.ERROR), None)
    if failed is not None:
        return failed
    behind = min(range(len(ranks)), key=lambda number: len(reached[number]))
    stage = len(reached[behind])
    if stage == len(STAGES):
        return reached[0][-1]
    places = [(*STAGES, "its end")[len(reports)] for reports in reached]
    listed = ", ".join(f"rank {number} at {place}" for number, place in enumerate(places))
    return stage_failed(stage, f"{listed}; of rank {behind}, {ranks[behind].ending}", mode)


def stage_failed(stage: int, reason: str, mode: str) -> Finding:
    action = _TOGETHER if stage == len(STAGES) - 1 else _CONNECT
    found = f"{STAGES[stage]} failed, with {MODE} {mode or 'not set'} for the model: {reason}"
    return error("hardware.collectives", found, action, stage=STAGES[stage])
