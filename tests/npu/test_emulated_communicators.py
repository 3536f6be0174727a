# SPDX-License-Identifier: Apache-2.0
"""Communicators of prefill's all-to-all groups beside the model's: what HCCL does not allow is refused here too."""

import time
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

import cann_on_host
from harness.pool import long
from harness.rank_processes import run_ranks, try_ranks
from vllm_ascend_pd.core.ascend import communicator_bytes, hccl_config
from vllm_ascend_pd.core.topology import regroup_groups, sharding
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import Cached, CacheDtype, ModelShape

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

A2, A3 = "Ascend910B1", "Ascend910_9391"
AIV_TWICE = "several communicators in mode AIV"


def aiv(chip: str) -> Mapping[str, str]:
    """Presets mode AIV, as the launch scripts do."""
    return {"HCCL_OP_EXPANSION_MODE": "AIV", "CANN_ON_HOST_SOC": chip}


def beside_the_model(rank: int, config: dict[str, int | str] | None, ordered: bool = False) -> str:
    """An all-to-all on a side stream while the model's stream has a collective; what is said against it."""
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = config or {}
    group = dist.new_group([0, 1], backend="hccl", pg_options=options)
    x, out, side = torch.zeros(4, device="npu"), torch.zeros(4, device="npu"), torch.npu.Stream()
    dist.all_reduce(x)
    dist.all_to_all_single(out, x, group=group)
    torch.npu.synchronize()
    said = ""
    with cann_on_host.delays(20_000):
        dist.all_reduce(x)
        if ordered:
            side.wait_stream(torch.npu.current_stream())
        try:
            with torch.npu.stream(side):
                dist.all_to_all_single(out, x, group=group)
        except RuntimeError as error:
            said = str(error)
        torch.npu.synchronize()
    return said


@pytest.mark.long
@pytest.mark.parametrize("chip", [A2, A3])
def test_two_communicators_in_mode_aiv_are_refused(chip: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert all(run_ranks(beside_the_model, 2, None, env=aiv(chip)))
    assert AIV_TWICE in capfd.readouterr().err


@pytest.mark.parametrize("chip", [A2, long(A3)])
def test_ours_may_run_beside_the_models(chip: str) -> None:
    assert run_ranks(beside_the_model, 2, hccl_config((0, 1), chip), env=aiv(chip)) == ["", ""]


@pytest.mark.long
@pytest.mark.parametrize(("chip", "other"), [(A2, A3), (A3, A2)])
def test_a_mode_of_another_chip_has_no_effect(chip: str, other: str) -> None:
    assert all(run_ranks(beside_the_model, 2, hccl_config((0, 1), other), env=aiv(chip)))


@pytest.mark.long
def test_one_after_the_other_is_allowed() -> None:
    assert run_ranks(beside_the_model, 2, None, True, env=aiv(A2)) == ["", ""]


def without_mode_aiv(rank: int) -> str:
    return beside_the_model(rank, None)


@pytest.mark.long
def test_other_modes_may_run_at_the_same_time() -> None:
    assert run_ranks(without_mode_aiv, 2, env={"CANN_ON_HOST_SOC": A2}) == ["", ""]


def connects_in_a_step(rank: int) -> bool:
    x = torch.zeros(4, device="npu")
    with cann_on_host.model_step():
        try:
            dist.all_reduce(x)
        except RuntimeError:
            return True
    return False


@pytest.mark.long
def test_a_communicator_that_connects_in_a_step_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert all(run_ranks(connects_in_a_step, 2))
    assert "connects on the thread that runs a model's step" in capfd.readouterr().err


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
    model = ModelShape("any", (Cached.FULL,), 4, 4, False, (32, 32), CacheDtype.BFLOAT16, ())
    engines = PlannedEngine("prefill", 4, 1, 1, 128), PlannedEngine("decode", 1, 1, 1, 128)
    plan = make_plan(model, *engines, step_tokens=100, staging_slots=1)
    assert plan.staging.groups == 2
    for rank, (taken, found) in enumerate(run_ranks(memory_of_groups, 4, env=aiv(A2))):
        assert taken == plan.staging.communicator_bytes == communicator_bytes(2)
        pair = rank // 2 * 2
        names = sorted(each.name.partition("(")[2] for each in found)
        assert names == sorted([f"pd-regroup-{pair}-{pair + 1})", "pd-regroup-0-3)"])
        assert not any(each.aiv for each in found)


def too_little_memory(rank: int) -> str:
    x = torch.zeros(4, device="npu")
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_a_communicator_takes_twice_its_buffer() -> None:
    env = {"CANN_ON_HOST_MEMORY_GB": "1", "HCCL_BUFFSIZE": "400"}
    assert run_ranks(too_little_memory, 2, env=env) == ["", ""]
    assert all(run_ranks(too_little_memory, 2, env=env | {"HCCL_BUFFSIZE": "600"}))


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
    for said, seconds in try_ranks(one_rank_does_not_connect, 2):
        assert said.startswith("DeviceError: ranks (0, 1) did not connect over HCCL: "), said
        assert seconds < 10
