# SPDX-License-Identifier: Apache-2.0
"""Communicators of prefill's all-to-all groups: their memory, and ranks that do not connect. `test_push.py` has
them beside the model's."""

import time

import pytest
import torch

import cann_on_host
from harness.rank_hosts import run_ranks
from vllm_ascend_pd.core.ascend import communicator_bytes
from vllm_ascend_pd.core.topology import regroup_groups, sharding
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.layers import LayerCache, ModelShape, TensorEntry

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

AIV = {"HCCL_OP_EXPANSION_MODE": "AIV", "CANN_ON_HOST_SOC": "Ascend910B1"}
"""As the launch scripts preset it."""


def memory_of_groups(rank: int) -> tuple[int, list[cann_on_host.Communicator]]:
    """Bytes that the groups of a prefill engine with TP 4 and 4 KV heads take of a rank's NPU, and what is there."""
    device = NpuDevice()

    def taken() -> int:
        """By others than torch."""
        free, total = torch.npu.mem_get_info()
        return total - free - torch.npu.memory_reserved()

    before = taken()
    groups = device.new_groups(regroup_groups(sharding(4), total=4), timeout_s=30)
    bytes_taken = taken() - before
    parts = torch.zeros(4, dtype=torch.uint8, device="npu")
    with cann_on_host.model_step():  # they have connected
        for group in groups.values():
            device.all_to_all(torch.empty_like(parts), parts, group)
    torch.npu.synchronize()
    return bytes_taken, [each for each in cann_on_host.communicators() if "pd-regroup" in each.name]


def test_memory_is_what_plan_says() -> None:
    cache = LayerCache("attn", (TensorEntry("bfloat16", 2, 4, 32),) * 2)
    model = ModelShape("any", 4, ((cache,),))
    engines = PlannedEngine("prefill", 4, 1, 1, 128), PlannedEngine("decode", 1, 1, 1, 128)
    plan = make_plan(model, *engines, step_tokens=100, staging_slots=1)
    assert plan.staging.groups == 2
    for rank, (taken, found) in enumerate(run_ranks(memory_of_groups, 4, env=AIV)):
        assert taken == plan.staging.communicator_bytes == communicator_bytes(2)
        pair = rank // 2 * 2
        names = sorted(each.name.partition("(")[2] for each in found)
        assert names == sorted([f"pd-regroup-{pair}-{pair + 1})", "pd-regroup-0-3)"])
        assert not any(each.aiv for each in found)


def one_rank_does_not_connect(rank: int) -> tuple[str, float]:
    device = NpuDevice()
    if rank == 1:
        cann_on_host.inject("hccl:hang")
    began = time.monotonic()
    try:
        device.new_groups([(0, 1)], timeout_s=3)
    except Exception as error:  # noqa: BLE001 - its text is compared
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "connected", 0.0


def test_ranks_that_do_not_connect_end_the_start() -> None:
    for said, seconds in run_ranks(one_rank_does_not_connect, 2):
        assert said.startswith("DeviceError: ranks (0, 1) did not connect over HCCL: "), said
        assert seconds < 10
