# SPDX-License-Identifier: Apache-2.0
"""Which layers decode keeps in int8, and what cannot be kept so. `test_push_int8.py` shows the bytes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ascend_pd.connector.int8_caches import int8_caches
from vllm_ascend_pd.core.caches import StateSpec, describe
from vllm_ascend_pd.core.layout import LayerSpec, LayoutError, Packing, TokenShare

HEADS, HEAD_SIZE, BLOCK = 2, 64, 16
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
SPEC = LayerSpec(0, BLOCK, HEADS, HEADS)


def config(layer: Any, *, fakquant: bool = False, who_computes: str = "never") -> Any:
    """Of an engine whose first layer is quantized."""
    quantized = NAMES[0].__eq__
    return SimpleNamespace(
        quant_config=SimpleNamespace(
            enable_fa_quant=fakquant,
            enable_c8_quant=not fakquant,
            is_fa_quant_layer=quantized,
            is_c8_quant_layer=quantized,
        ),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer)),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"who_computes": who_computes}),
        additional_config={},
    )


def dense(scale: float = 1.0) -> SimpleNamespace:
    names = [f"{which}_cache_{what}" for which in "kv" for what in ("scale", "offset")]
    return SimpleNamespace(**{name: torch.full((HEADS * HEAD_SIZE,), scale) for name in names})


LATENT = SimpleNamespace(fak_descale=torch.ones(1), fak_offset=torch.zeros(1))


def test_only_quantized_layers_are_packed_and_by_their_scales() -> None:
    specs: dict[str, LayerSpec | StateSpec] = dict.fromkeys(NAMES, SPEC)
    found, functions = int8_caches(specs, config(dense()), prefills=True)
    assert found[NAMES[1]] is SPEC
    assert set(functions) == {(NAMES[0], 0), (NAMES[0], 1)}
    decodes, none = int8_caches(specs, config(dense()), prefills=False)
    changed, _ = int8_caches(specs, config(dense(2.0)), prefills=False)
    first, same, other = (each[NAMES[0]] for each in (found, decodes, changed))
    assert (first.is_packed, same.is_packed, none) == (False, True, {})
    assert first.scales == same.scales != other.scales
    assert int8_caches(specs, SimpleNamespace(quant_config=None), prefills=True) == (specs, {})


@pytest.mark.parametrize("fakquant", [False, True])
def test_a_decode_engine_that_keeps_int8_must_not_compute_prompts(fakquant: bool) -> None:
    specs: dict[str, LayerSpec | StateSpec] = {NAMES[0]: SPEC}
    computes = config(LATENT if fakquant else dense(), fakquant=fakquant, who_computes="auto")
    with pytest.raises(LayoutError, match="cannot compute prompts: set who_computes to never"):
        int8_caches(specs, computes, prefills=False)
    int8_caches(specs, computes, prefills=True)


def test_mla_has_its_latent_in_int8_and_its_rope_in_16_bits() -> None:
    specs: dict[str, LayerSpec | StateSpec] = {NAMES[0]: SPEC}
    found, functions = int8_caches(specs, config(LATENT, fakquant=True), prefills=True)
    assert found[NAMES[0]].packings == (Packing.INT8_NZ, Packing.NZ)  # type: ignore[union-attr]
    assert set(functions) == {(NAMES[0], 0)}


def test_a_layer_without_scales_is_named() -> None:
    with pytest.raises(LayoutError, match=rf"{NAMES[0]}: its checkpoint has scales .* 'k_cache_scale'"):
        int8_caches({NAMES[0]: SPEC}, config(SimpleNamespace()), prefills=True)


C8 = (Packing.INT8_NZ, Packing.INT8_NZ)
# By what cannot be: its spec, the tokens of a block, the head size, and the caches' type.
REFUSED: dict[str, tuple[dict[str, Any], int, int, torch.dtype]] = {
    "blocks of 8 tokens with heads of 64 bytes cannot lie in NZ order": ({"block_size": 8}, 8, 64, torch.bfloat16),
    "blocks of 16 tokens with heads of 16 bytes cannot lie in NZ order": ({}, 16, 16, torch.bfloat16),
    "context parallelism with caches that decode keeps in int8": ({"share": TokenShare(2)}, 16, 64, torch.bfloat16),
    "a cache of torch.float8_e4m3fn is not supported where decode keeps int8": ({}, 16, 64, torch.float8_e4m3fn),
    "a cache of torch.float32 is not supported where decode keeps int8": ({}, 16, 64, torch.float32),
    "2 tensors where decode keeps 1 in NZ order": ({"packings": (Packing.NZ,)}, 16, 64, torch.bfloat16),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_caches_that_cannot_be_packed_are_refused(reason: str) -> None:
    changes, tokens, size, dtype = REFUSED[reason]
    spec = LayerSpec(**{"group": 0, "block_size": BLOCK, "heads": 1, "total_heads": 1, "packings": C8, **changes})
    cache = torch.zeros(4, tokens, 1, size, dtype=dtype)
    with pytest.raises(LayoutError, match=reason):
        describe({"layer": (cache, cache.clone())}, {"layer": spec}, heads_first=False)


def test_a_decode_engine_that_does_not_keep_int8_is_refused() -> None:
    spec = LayerSpec(0, BLOCK, HEADS, HEADS, packings=C8, is_packed=True)
    cache = torch.zeros(4, BLOCK, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"a cache of torch\.bfloat16 is not supported .* expected int8"):
        describe({"layer": (cache, cache.clone())}, {"layer": spec}, heads_first=False)
