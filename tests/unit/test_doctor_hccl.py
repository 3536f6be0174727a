# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the memory that HCCL takes for a prefill engine's groups."""

from vllm_ascend_pd.tools.doctor import hccl
from vllm_ascend_pd.tools.doctor.engine_config import KvTransferConfig
from vllm_ascend_pd.tools.doctor.finding import Level


def test_memory_of_communicators() -> None:
    [found] = hccl.judge(KvTransferConfig(kv_role="kv_producer"), on_npu=True)
    assert (found.check, found.level) == ("npu.communicators", Level.OK)
    assert found.figures == {"communicator_bytes": 2 * 16 * 1024**2}
    assert "takes 32 MiB of NPU memory (2 x 16 MiB)" in found.found
    assert hccl.judge(KvTransferConfig(kv_role="kv_consumer"), on_npu=True) == []
    assert hccl.judge(KvTransferConfig(kv_role="kv_producer"), on_npu=False) == []
    assert hccl.judge(None, on_npu=True) == []
