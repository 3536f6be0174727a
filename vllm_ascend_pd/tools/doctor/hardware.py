# SPDX-License-Identifier: Apache-2.0
"""The steps of `vllm-ascend-pd doctor --hardware` on NPUs. Each step runs in child processes, with a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from vllm_ascend_pd.tools.doctor import collectives, kernels, loopback
from vllm_ascend_pd.tools.doctor.finding import Finding, Level, error, note
from vllm_ascend_pd.tools.doctor.loopback import Way
from vllm_ascend_pd.tools.doctor.progress import Progress

STEP_TIMEOUT_S = 60.0
WRITES = 16

_TIMEOUTS = {"ASCEND_CONNECT_TIMEOUT": "10000", "ASCEND_TRANSFER_TIMEOUT": "10000"}
"""Milliseconds. Both of Mooncake's attempts end within a step, so that the finding has Mooncake's reason."""
_OVER_ROCE = {"HCCL_INTRA_ROCE_ENABLE": "1", "HCCL_INTRA_PCIE_ENABLE": "0"}

_DEVICES = "hardware.devices"
_NO_TORCH_NPU = "run it on a machine with NPUs, in the engines' environment (requirements/npu.txt)"
_NO_NPU = (
    "see the findings of npu.* and loading.torch_npu above; in a container, pass /dev/davinci<N> of two NPUs or more"
)
_LINK = (
    "see the findings of hccn.* above, and that no other process holds these NPUs; with ASCEND_GLOBAL_LOG_LEVEL=1, "
    "plog in ~/ascend/log says why HIXL failed"
)
_ROCE = (
    "prefill and decode on different servers need RoCE: give each NPU an address (hccn_tool -i N -ip -s ...), connect "
    "its port, and mount /etc/hccn.conf into containers"
)


async def check(npus: Sequence[str], host: str, progress: Progress, timeout_s: float) -> list[Finding]:
    """Runs the steps one after the other.

    npus: the machine's numbers of the NPUs that processes see, in their order; "?" if ACL does not tell a number.
    host: where engines listen.
    timeout_s: the timeout of each step.
    """
    if find_spec("torch_npu") is None:
        return [error(_DEVICES, "torch_npu is not installed: no step of --hardware can run", _NO_TORCH_NPU)]
    if not npus:
        return [error(_DEVICES, "torch_npu finds no NPU: no step of --hardware can run", _NO_NPU)]
    findings = []
    async with progress.step("running the regroup ops on an NPU"):
        findings.append(await kernels.check(timeout_s))
    if len(npus) < 2:
        left_out = "one NPU: writes between NPUs and collectives are left out"
        return [note(_DEVICES, left_out, "run this with two NPUs or more"), *findings]
    for way in ways(npus, host):
        async with progress.step(f"writing {way.between}"):
            findings.append(await loopback.check(way, timeout_s=timeout_s))
    size = min(len(npus), collectives.MAX_RANKS)
    async with progress.step(f"exchanging between {size} NPUs"):
        findings.append(await collectives.check(size, timeout_s))
    return findings


def ways(npus: Sequence[str], host: str) -> list[Way]:
    """Returns transfers from the first NPU to its neighbour and to the last NPU, and back over RoCE."""
    pairs = dict.fromkeys([(0, 1), (0, len(npus) - 1)])
    made = [_way(npus, source, destination, host) for source, destination in pairs]
    return [*made, _way(npus, len(npus) - 1, 0, host, roce=True)]


def _way(npus: Sequence[str], source: int, destination: int, host: str, roce: bool = False) -> Way:
    name = "roce" if roce else "ascend"
    return Way(
        check=f"hardware.write.{name}.{npus[source]}-{npus[destination]}",
        between=f"from NPU {npus[source]} to NPU {npus[destination]} by ascend" + (" over RoCE" if roce else ""),
        action=_ROCE if roce else _LINK,
        protocol="ascend",
        host=host,
        source=source,
        destination=destination,
        writes=WRITES,
        environment={**_TIMEOUTS, **(_OVER_ROCE if roce else {})},
        failed=Level.WARNING if roce else Level.ERROR,
    )
