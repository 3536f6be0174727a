# SPDX-License-Identifier: Apache-2.0
"""The staging memory that `vllm-ascend-pd plan` predicts equals what a real prefill rank allocates. It is 20 times
less than a layer's K and V cache, which vllm-ascend 0.23's layerwise connector registers (`create_kv_buffer`)."""

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import LayerSpec
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.tools.plan.engine import PlannedEngine, rank_caches
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.layers import LayerCache, ModelShape, TensorEntry
from vllm_ascend_pd.tools.plan.model import parse_model
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

LAYERS, BLOCK_SIZE, STEP_TOKENS, SLOTS = 2, 16, 100, 3


class CountingDevice(CpuDevice):
    """Records what was allocated."""

    allocated = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes)


def allocated_by_a_rank(shapes: list[tuple[int, ...]], spec: LayerSpec, world: str) -> int:
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
            describe(caches, dict.fromkeys(names, spec), heads_first=False),
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


@pytest.mark.parametrize(("heads", "widths"), [(4, (32, 32)), (2, (48, 16)), (1, (64, 8))])
def test_staging_memory(process, tmp_path, heads, widths):
    cache = LayerCache("attn", tuple(TensorEntry("bfloat16", 2, heads, width) for width in widths))
    model = ModelShape("any", heads, ((cache,),) * LAYERS)
    engines = PlannedEngine("prefill", 1, 1, 1, BLOCK_SIZE), PlannedEngine("decode", 1, 1, 1, BLOCK_SIZE)
    plan = make_plan(model, *engines, step_tokens=STEP_TOKENS, staging_slots=SLOTS)
    shapes = [(3, BLOCK_SIZE, heads, width) for width in widths]
    spec = LayerSpec(0, BLOCK_SIZE, heads, heads)
    rank = process.submit(allocated_by_a_rank, shapes, spec, str(tmp_path / "world"))
    assert rank.result(120) == plan.staging.total_bytes
    assert (plan.staging.total_bytes > 0) == (heads > 1)


@pytest.mark.parametrize("step_tokens", [2048, 8192, 16384])
@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize(("layers", "kv_heads"), [(80, 8), (94, 4)], ids=["Llama-3.1-70B", "Qwen3-235B-A22B"])
def test_20_times_less_than_a_layers_cache(layers, kv_heads, ratio, step_tokens):
    """In whole pages of registration, on a rank of TP 8 with a cache of 36 GB."""
    shape = {"num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": kv_heads, "head_dim": 128}
    model = parse_model({"model_type": "llama", "torch_dtype": "bfloat16", **shape})
    prefill, decode = PlannedEngine("prefill", 8, 1, 1, 128), PlannedEngine("decode", kv_heads // ratio, 1, 1, 128)
    slots = ConnectorConfig().slots(step_tokens)
    plan = make_plan(model, prefill, decode, step_tokens=step_tokens, staging_slots=slots)
    caches = rank_caches(model, prefill, 0, 0, 1)
    block_bytes = sum(caches.geometry_of(tensor).block_bytes for tensor in caches.tensors)  # of all layers
    layer_bytes = 36 * 10**9 // block_bytes * block_bytes // layers
    ring = math.ceil(plan.staging.slots * plan.staging.slot_bytes / REGISTRATION_BYTES) * REGISTRATION_BYTES
    assert 0 < 20 * ring <= layer_bytes
