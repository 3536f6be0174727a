# SPDX-License-Identifier: Apache-2.0
"""Memory that a prefill rank registers for regrouping: what `plan` says, on real ranks, and 20 times less than a
layer's K and V cache, which is what vllm-ascend 0.23's layerwise connector registers (`create_kv_buffer`)."""

import math
from typing import Any

import pytest

from harness.kv import Model, Side
from harness.ports import reserve_port
from harness.rank_hosts import Rank
from harness.rank_programs import PrefillRank
from vllm_ascend_pd.core.caches import merge
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine, rank_caches
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.figures import Staging
from vllm_ascend_pd.tools.plan.model import Cached, CacheDtype, ModelShape, parse_model

BLOCK, PREFILL_TP, CACHE_BYTES = 128, 8, 36 * 10**9
TIMEOUT_S = 60.0


def staging(model: ModelShape, prefill_tp: int, decode_tp: int, block: int, step_tokens: int) -> Staging:
    engines = (PlannedEngine("prefill", prefill_tp, 1, 1, block), PlannedEngine("decode", decode_tp, 1, 1, block))
    slots = ConnectorConfig().slots(step_tokens)
    return make_plan(model, Layout.VLLM_ASCEND, *engines, step_tokens=step_tokens, staging_slots=slots).staging


@pytest.mark.parametrize("step_tokens", [2048, 8192, 16384])
@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize(("layers", "kv_heads"), [(80, 8), (94, 4)], ids=["Llama-3.1-70B", "Qwen3-235B-A22B"])
def test_a_ring_takes_20_times_less_than_a_layers_cache(
    layers: int, kv_heads: int, ratio: int, step_tokens: int
) -> None:
    shape = {"num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": kv_heads, "head_dim": 128}
    model = parse_model({"architectures": ["any"], "torch_dtype": "bfloat16", **shape})
    found = staging(model, PREFILL_TP, min(PREFILL_TP, kv_heads) // ratio, BLOCK, step_tokens)
    caches = rank_caches(model, Layout.VLLM_ASCEND, PlannedEngine("prefill", PREFILL_TP, 1, 1, BLOCK), 0, 0, 1)
    block_bytes = sum(caches.geometry_of(tensor).block_bytes for tensor in caches.tensors)  # of all layers
    layer_bytes = CACHE_BYTES // block_bytes * block_bytes // layers
    registered = math.ceil(found.slots * found.slot_bytes / REGISTRATION_BYTES) * REGISTRATION_BYTES
    assert 0 < 20 * registered <= layer_bytes


class CountingRank(PrefillRank):
    """Counts what it registers with Mooncake."""

    def __post_init__(self) -> None:
        from unittest.mock import patch

        from mooncake import engine as mooncake

        self.sizes = sizes = {}  # of the regions that Mooncake has taken, by address

        class CountingEngine(mooncake.TransferEngine):  # type: ignore[misc]
            def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
                code = int(super().batch_register_memory(addresses, lengths))
                if code == 0:
                    sizes.update(zip(addresses, lengths, strict=True))
                return code

        with patch.object(mooncake, "TransferEngine", CountingEngine):
            super().__post_init__()

    def beside_caches(self) -> int:
        caches = merge(self.registered.regions())
        assert all(self.sizes.get(address) == size for address, size in caches)
        return sum(self.sizes.values()) - sum(size for _, size in caches)


def test_real_ranks_register_what_plan_says() -> None:
    small, side = Model(layers=2, heads=2, widths=(64, 64)), Side(2, num_blocks=8)
    model = ModelShape("small", (Cached.FULL,) * 2, 2, 2, False, small.widths, CacheDtype.BFLOAT16, ())
    init = f"tcp://127.0.0.1:{reserve_port()}"
    more: tuple[Any, ...] = (0, init, "prefill", {}, "cpu")
    ranks = [Rank(CountingRank, small, side, rank, *more, device="cpu") for rank in range(side.tp)]
    try:
        for rank in ranks:
            rank.receive(TIMEOUT_S)
        found = staging(model, side.tp, 1, side.block_size, side.step_tokens)
        assert [rank.call("beside_caches") for rank in ranks] == [found.slots * found.slot_bytes] * 2
    finally:
        for rank in ranks:
            rank.stop()
        left = [what for rank in ranks for what in rank.stopped()]
    assert not left
