# SPDX-License-Identifier: Apache-2.0
"""The caches that vllm-ascend registers, and their specs."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm_ascend_contract import BLOCK, engine_config

from harness.ascend_caches import allocate_hybrid, allocate_mla, mla_cache_config, sparse_spec
from vllm_ascend_pd.connector import caches as caches_module
from vllm_ascend_pd.connector.int8_caches import int8_caches
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import Order, Packing

pytestmark = pytest.mark.npu

ALIGNMENT = 2 << 20


BF16, INT8, FP16 = torch.bfloat16, torch.int8, torch.float16
# What vllm-ascend makes of the cache of sparse attention: elements per token and their types.
QUANTIZED = {
    "indexer": ((False, True), ((512, BF16), (64, BF16), (128, INT8), (1, FP16))),
    "latent": ((True, False), ((656, INT8), (128, BF16))),
    "latent-and-indexer": ((True, True), ((656, INT8), (128, INT8), (1, FP16))),
}


@pytest.mark.parametrize(("in_8_bits", "parts"), QUANTIZED.values(), ids=QUANTIZED.keys())
def test_quantized_caches_of_sparse_attention(
    plugins: None, mla_model: Path, in_8_bits: tuple[bool, bool], parts: tuple
) -> None:
    """Int8 keys have a float16 scale each, behind them in the same memory. A layer that uses another one's index has
    neither. tests/integration/test_push.py sends such caches."""
    packed, index_int8 = in_8_bits
    indexed, other = (f"model.layers.{i}.self_attn.attn" for i in range(2))
    specs = {
        indexed: sparse_spec(BLOCK, packed=packed, index=True, index_int8=index_int8),
        other: sparse_spec(BLOCK, packed=packed, index=False),
    }
    caches = mla_cache_config(specs, num_blocks=4)
    tensors = allocate_mla(caches, "npu")
    expected = {indexed: parts, other: parts[: 1 if packed else 2]}
    for layer, own in tensors.items():
        assert [(x.shape, x.dtype) for x in own] == [((4, BLOCK, 1, width), dtype) for width, dtype in expected[layer]]
    described = describe(tensors, caches_module.layer_specs(caches, engine_config(mla_model)), heads_first=False)
    description = described.description
    geometries = [description.geometry_of(tensor) for tensor in description.tensors]
    assert [(g.dtype, g.head_bytes, g.total_heads) for g in geometries] == [
        (str(dtype).removeprefix("torch."), width * dtype.itemsize, 1)
        for layer in expected
        for width, dtype in expected[layer]
    ]
    assert {address % ALIGNMENT for address, _ in described.regions()} == {0}, "HCCS needs multiples of 2 MiB"


def test_a_latent_in_int8_lies_beside_a_rope_in_16_bits(plugins: None, mla_model: Path) -> None:
    """On decode, of a checkpoint with FAKQuant in its first layer. tests/npu/test_push_int8.py sends such caches."""
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
    from vllm_ascend.quantization.modelslim_config import AscendModelSlimConfig

    def spec(width: int, dtype: torch.dtype) -> AscendMLAAttentionSpec:
        return AscendMLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=width, dtype=dtype)

    quantized, plain = (f"model.layers.{i}.self_attn.attn" for i in range(2))
    # As the model runner's `get_kv_cache_spec` has them: a rope in 16 bits counts twice beside int8.
    caches = mla_cache_config({quantized: spec(512 + 2 * 64, INT8), plain: spec(512 + 64, BF16)}, num_blocks=4)
    description = {"fa_quant_type": "FAKQuant", "model.layers.0.self_attn.fa_k.scale": "FLOAT"}
    config = SimpleNamespace(
        quant_config=AscendModelSlimConfig(description),
        compilation_config=SimpleNamespace(
            static_forward_context={quantized: SimpleNamespace(fak_descale=torch.ones(1), fak_offset=torch.zeros(1))}
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"who_computes": "never"}),
    )
    tensors = allocate_mla(caches, "npu", config.quant_config)
    specs, _ = int8_caches(caches_module.layer_specs(caches, engine_config(mla_model)), config, prefills=False)
    described = describe(tensors, specs, heads_first=False).description
    kept = [described.geometry_of(tensor) for tensor in described.tensors]
    assert [(g.dtype, g.head_bytes, g.packing, g.order) for g in kept] == [
        ("int8", 512, Packing.INT8_NZ, Order.HEAD_MAJOR),
        ("bfloat16", 128, Packing.NZ, Order.HEAD_MAJOR),
        ("bfloat16", 1024, Packing.NONE, Order.TOKEN_MAJOR),
        ("bfloat16", 128, Packing.NONE, Order.TOKEN_MAJOR),
    ]


def test_blocks_beside_states_are_several_of_the_kernels(plugins: None) -> None:
    """Where attention shares its memory with states, as in Qwen3-Next: vllm-ascend's own allocation and views."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec

    heads, head_size, blocks = 2, 256, 4
    conv, ssm = (3, 8192), (32, 128, 128)
    block_size = math.prod(ssm) // (heads * head_size)
    page = 2 * (math.prod(conv) + 2 * math.prod(ssm))
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=BF16, page_size_padded=page
    )
    states = MambaSpec(
        block_size=4096,
        shapes=(conv, ssm),
        dtypes=(BF16, BF16),
        page_size_padded=page,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    groups = [KVCacheGroupSpec(["linear.0"], states), KVCacheGroupSpec(["attention.0"], attention)]
    shared = KVCacheTensor(size=blocks * page, shared_by=["linear.0", "attention.0"])
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[shared], kv_cache_groups=groups)
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads, hf_text_config=SimpleNamespace(num_hidden_layers=2, model_type="qwen")
    )
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        quant_config=None,
        model_config=model,
    )
    tensors = allocate_hybrid(caches, config, "cpu")
    k, v = tensors["attention.0"]
    assert k.shape == v.shape == (blocks * block_size // BLOCK, BLOCK, heads, head_size), "kernels' blocks are others"
    registered = describe(tensors, caches_module.layer_specs(caches, config), heads_first=False)
    geometry = registered.description.geometries[
        registered.description.tensors[registered.layers["attention.0"][0]].geometry
    ]
    assert (geometry.block_size, geometry.block_stride) == (block_size, block_size * heads * head_size * 2)
    assert [t.shape[0] for t in registered.tensors[-2:]] == [blocks, blocks]
    assert [t.data_ptr() for t in registered.tensors[-2:]] == [k.data_ptr(), v.data_ptr()]


@pytest.mark.parametrize(("role", "stored"), [("kv_producer", None), ("kv_consumer", torch.int8)])
def test_dense_attention_is_quantized_on_decode_alone(
    plugins: None, dense_model: Path, role: str, stored: torch.dtype | None
) -> None:
    """So prefill must quantize what it sends. `test_push_int8.py` compares the bytes."""
    from vllm.config import set_current_vllm_config
    from vllm_ascend.quantization.methods.kv_c8 import AscendC8KVCacheAttentionMethod

    layer = torch.nn.Module()
    with set_current_vllm_config(engine_config(dense_model, kv_role=role)):
        AscendC8KVCacheAttentionMethod({}, "model.layers.0").create_weights(layer)
    assert getattr(layer, "kv_cache_torch_dtype", None) is stored, (
        "both sides keep the same now: prefill must not quantize"
    )
