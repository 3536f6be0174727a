# SPDX-License-Identifier: Apache-2.0
"""Reports the memory that HCCL takes on an NPU for a prefill engine's all-to-all groups."""

from __future__ import annotations

from vllm_ascend_pd.core.communicator import BUFFER_MB, communicator_bytes
from vllm_ascend_pd.tools.doctor.engine_config import KvTransferConfig
from vllm_ascend_pd.tools.doctor.finding import Finding, ok


def judge(config: KvTransferConfig | None, on_npu: bool) -> list[Finding]:
    """Returns nothing unless a prefill engine is planned on NPUs."""
    if not on_npu or config is None or config.kv_role != "kv_producer":
        return []
    each = communicator_bytes(1)
    found = (
        f"each all-to-all group of a prefill rank takes {each >> 20} MiB of NPU memory (2 x {BUFFER_MB} MiB), which "
        "vLLM does not count when it sizes its KV cache; `vllm-ascend-pd plan` counts a rank's groups"
    )
    return [ok("npu.communicators", found, communicator_bytes=each)]
