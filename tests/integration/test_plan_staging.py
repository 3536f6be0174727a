# SPDX-License-Identifier: Apache-2.0
"""The staging memory that `vllm-ascend-pd plan` predicts equals what a real prefill rank allocates."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_pd.core.caches import LayerSpec, describe
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import Cached, CacheDtype, ModelShape
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

LAYERS, BLOCK_SIZE, STEP_TOKENS, SLOTS = 2, 16, 100, 3


class CountingDevice(CpuDevice):
    """Records what was allocated."""

    allocated = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes)


def allocated_by_a_rank(shapes: list[tuple[int, ...]], spec: LayerSpec, heads_first: bool, world: str) -> int:
    """Returns the allocated bytes. Runs in a process of its own, because Mooncake's settings stay in a process."""
    dist.init_process_group("gloo", init_method=f"file://{world}", world_size=1, rank=0)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    caches = {name: tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes) for name in names}
    device = CountingDevice()
    engine = TransferEngine("127.0.0.1", "tcp", TransferLimits())
    try:
        worker = PrefillWorker(
            RankInfo("prefill", "any", "127.0.0.1", 0, sharding(1), 0, 1, (0,)),
            ConnectorConfig(staging_slots=SLOTS),
            device,
            engine,
            describe(caches, dict.fromkeys(names, spec), heads_first=heads_first),
            STEP_TOKENS,
        )
        worker.close(5.0)
    finally:
        device.close()
        engine.close()
        dist.destroy_process_group()
    return device.allocated


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("heads", "widths", "layout"),
    [
        (4, (32, 32), Layout.VLLM_ASCEND),
        (2, (48, 16), Layout.VLLM_ASCEND),
        (1, (64, 8), Layout.VLLM_ASCEND),
        (4, (32, 32), Layout.VLLM_CPU),
    ],
)
def test_staging_memory(process, tmp_path, heads, widths, layout):
    block_size = BLOCK_SIZE if layout is Layout.VLLM_ASCEND else 32
    model = ModelShape("any", (Cached.FULL,) * LAYERS, heads, heads, False, widths, CacheDtype.BFLOAT16, ())
    engines = PlannedEngine("prefill", 1, 1, 1, block_size), PlannedEngine("decode", 1, 1, 1, block_size)
    plan = make_plan(model, layout, *engines, step_tokens=STEP_TOKENS, staging_slots=SLOTS)
    shapes = (
        [(3, block_size, heads, width) for width in widths]
        if layout is Layout.VLLM_ASCEND
        else [(3, heads, block_size, sum(widths))]
    )
    spec = LayerSpec(0, block_size, heads, heads)
    rank = process.submit(allocated_by_a_rank, shapes, spec, layout is Layout.VLLM_CPU, str(tmp_path / "world"))
    assert rank.result(120) == plan.staging.total_bytes
    assert (plan.staging.total_bytes > 0) == (heads > 1 and layout is Layout.VLLM_ASCEND)
