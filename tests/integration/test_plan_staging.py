# SPDX-License-Identifier: Apache-2.0
"""The staging memory that `vllm-ascend-pd plan` predicts is what a real prefill rank sets aside."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_pd.config import ConnectorConfig
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.planning.engine import Engine, Layout
from vllm_ascend_pd.planning.exchange import make_plan
from vllm_ascend_pd.planning.model import Cached, CacheDtype, Model
from vllm_ascend_pd.transport.engine import TransferEngine, TransferLimits
from vllm_ascend_pd.worker.caches import LayerSpec, describe
from vllm_ascend_pd.worker.identity import Identity
from vllm_ascend_pd.worker.producer import ProducerWorker

LAYERS, BLOCK_SIZE, STEP_TOKENS, SLOTS = 2, 16, 100, 3


class CountingDevice(CpuDevice):
    """Remembers what was allocated."""

    allocated = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes)


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    """What a rank's process groups are made from."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("heads", "widths", "layout"),
    [
        (4, (32, 32), Layout.VLLM_ASCEND),
        (2, (48, 16), Layout.VLLM_ASCEND),
        (1, (64, 8), Layout.VLLM_ASCEND),
        (4, (32, 32), Layout.VLLM_CPU),
    ],
)
def test_staging_memory(heads, widths, layout):
    block_size = BLOCK_SIZE if layout is Layout.VLLM_ASCEND else 32
    model = Model("any", (Cached.FULL,) * LAYERS, heads, heads, False, widths, CacheDtype.BFLOAT16, ())
    engines = Engine("prefill", 1, 1, 1, block_size), Engine("decode", 1, 1, 1, block_size)
    plan = make_plan(model, layout, *engines, step_tokens=STEP_TOKENS, staging_slots=SLOTS)
    shapes = (
        [(3, block_size, heads, width) for width in widths]
        if layout is Layout.VLLM_ASCEND
        else [(3, heads, block_size, sum(widths))]
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    caches = {name: tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes) for name in names}
    specs = dict.fromkeys(names, LayerSpec(0, block_size, heads, heads))
    device = CountingDevice()
    engine = TransferEngine("127.0.0.1", "tcp", TransferLimits())
    try:
        worker = ProducerWorker(
            Identity("prefill", "any", "127.0.0.1", 0, 1, 0, 1, (0,)),
            ConnectorConfig(staging_slots=SLOTS),
            device,
            engine,
            describe(caches, specs, heads_first=layout is Layout.VLLM_CPU),
            STEP_TOKENS,
        )
        worker.close(5.0)
    finally:
        device.close()
        engine.close()
    assert device.allocated == plan.staging.total_bytes
    assert (plan.staging.total_bytes > 0) == (heads > 1 and layout is Layout.VLLM_ASCEND)
