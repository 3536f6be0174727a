# SPDX-License-Identifier: Apache-2.0
"""Decode's int8 caches (C8, FAKQuant) hold the bytes that vllm-ascend's own functions make of prefill's KV.

Which layers are quantized, and their scales, are found in vllm-ascend's own objects. Layer 1 is not quantized.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.kv import C8, FAKQUANT, Prompt, Side, from_nz, layer_name, truth
from harness.pool import long
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import MakePair, Pair, expect_delivery, expect_failure, prompts, run
from vllm_ascend_pd.core.caches import Quantize

pytestmark = pytest.mark.npu

BLOCK = 128
DENSE = replace(C8, widths=(128, 128))
LATENT = replace(FAKQUANT, widths=(512, 64))


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)


class _AscendRank:
    """What both sides' ranks add to those of the harness: vllm-ascend's configuration of the checkpoint says which
    layers are quantized, and its layers hold the scales."""

    def packed(self: Any, specs: dict[str, Any]) -> dict[str, Any]:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        import vllm_ascend.ops  # noqa: F401  # the modules below import each other in a circle otherwise
        from vllm_ascend.ops import register_custom_ops  # noqa: F401  # torch.ops.vllm.quantize
        from vllm_ascend.quantization.modelslim_config import AscendModelSlimConfig

        from vllm_ascend_pd.connector.int8_caches import int8_caches

        is_mla = self.model.replicated
        described = {"fa_quant_type": "FAKQuant"} if is_mla else {"kv_cache_type": "C8"}
        key = "fa_k.scale" if is_mla else "k_proj.kv_cache_scale"
        described |= {f"model.layers.{layer}.self_attn.{key}": "FLOAT" for layer in self.packed_layers()}
        make = self._latent_layer if is_mla else self._dense_layer
        self.layers = {layer_name(layer): make(layer) for layer in self.packed_layers()}
        config = SimpleNamespace(
            quant_config=AscendModelSlimConfig(described),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"who_computes": "never"}),
        )
        found, self.functions = int8_caches(specs, config, prefills=not self.is_packed)
        return found

    def _dense_layer(self: Any, layer: int) -> torch.nn.Module:
        """An attention layer whose checkpoint has scales of all heads, which its attention cuts for this rank."""
        import vllm_ascend.attention.attention_v1 as attention

        made = torch.nn.Module()
        for part, which in enumerate("kv"):
            scale, offset = self.model.scales(layer, part)
            setattr(made, f"{which}_cache_scale", _parameter(scale.flatten().to(self.on)))
            setattr(made, f"{which}_cache_offset", _parameter(offset.flatten().to(self.on)))
        attention.get_tensor_model_parallel_rank = lambda: self.rank % self.side.tp
        attention.get_tensor_model_parallel_world_size = lambda: self.side.tp
        self.impl = attention.AscendC8AttentionBackendImpl.__new__(attention.AscendC8AttentionBackendImpl)
        self.impl.num_kv_heads, self.impl.head_size = len(self._heads()), self.model.widths[0]
        self.impl._prepare_c8_scales(made, torch.device(self.on))
        return made

    def _latent_layer(self: Any, layer: int) -> torch.nn.Module:
        """An MLA layer with one scale for its latent."""
        from vllm_ascend.quantization.methods.kv_c8 import AscendFAQuantAttentionMethod

        scale, offset = (each[0, 0].reshape(1, 1).to(self.on) for each in self.model.scales(layer, 0))
        made, made.fa_k = torch.nn.Module(), torch.nn.Module()
        made.fa_k.scale, made.fa_k.offset = _parameter(scale), _parameter(offset.to(torch.int8))
        method = AscendFAQuantAttentionMethod.__new__(AscendFAQuantAttentionMethod)
        method.kv_lora_rank = self.model.widths[0]
        method.process_weights_after_loading(made)
        return made


class AscendPrefillRank(_AscendRank, PrefillRank):
    def quantize(self) -> dict[tuple[str, int], Quantize]:
        return self.functions


class AscendDecodeRank(_AscendRank, DecodeRank):
    def expected(self, layer: int, part: int, prompt: Prompt) -> torch.Tensor:
        """Returns what vllm-ascend's own connector would send of this KV, and zeros for other ranks' heads."""
        values = truth(self.model, prompt.seed, layer, part, prompt.num_tokens)
        if layer in self.model.plain:
            return values
        own, tokens, size = self._heads(), prompt.num_tokens, self.side.block_size
        blocks = -(-tokens // size)
        kept = torch.zeros(blocks * size, len(own), values.shape[2], dtype=values.dtype)
        kept[:tokens] = values[:, own.start : own.stop]
        in_nz = self._quantized(layer, part, kept.to(self.on)).cpu()
        ours = from_nz(in_nz.reshape(blocks, size, *kept.shape[1:])).flatten(0, 1)[:tokens]
        whole = torch.zeros_like(values, dtype=ours.dtype)
        whole[:, own.start : own.stop] = ours
        return whole

    def _quantized(self, layer: int, part: int, kv: torch.Tensor) -> torch.Tensor:
        from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_layerwise_connector import (
            MooncakeLayerwiseConnectorWorker,
        )

        owner = self.layers[layer_name(layer)]
        if not self.model.replicated:
            kv = self.impl._quantize_kv_to_int8(kv, kv, owner, len(kv))[part]
        elif part == 0:
            scales = owner.fak_descale, owner.fak_descale_reciprocal, owner.fak_offset
            kv = torch.ops.vllm.quantize(kv, *scales)
        connector = SimpleNamespace(block_size=[self.side.block_size])
        return MooncakeLayerwiseConnectorWorker.get_nz_cache(connector, kv, 0)


def side(tp: int) -> Side:
    return Side(tp, num_blocks=24, block_size=BLOCK)


SHAPES = {
    f"{name}-tp{p}-to-tp{d}": (model, side(p), side(d))
    for name, model in (("c8", DENSE), ("fakquant", LATENT))
    for p, d in [(1, 1), (2, 1), (4, 1), (1, 2)]
}
LONG = ("c8-tp4-to-tp1", "fakquant-tp4-to-tp1", "fakquant-tp1-to-tp2")
PROGRAMS = (AscendPrefillRank, AscendDecodeRank)


DELAY = ("CANN_ON_HOST_DELAY_US", "500")


def test_other_scales_are_refused(monkeypatch: pytest.MonkeyPatch, make_pair: MakePair) -> None:
    monkeypatch.setenv(*DELAY)  # as below, so that the ranks there run in the same processes
    pair = make_pair(DENSE, side(1), side(1), p_model=replace(DENSE, salt=1), device="npu", programs=PROGRAMS)
    run(pair, prompts(pair, [40]))
    expect_failure(pair, "prefill and decode have other scales for KV in int8")


@pytest.fixture(scope="module", params=[long(shape) if shape in LONG else shape for shape in SHAPES])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*DELAY)
        made = Pair(*SHAPES[request.param], device="npu", programs=PROGRAMS)
        yield made
        assert made.close() == []


@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (200, 0), (None, 128)], ids=["whole", "chunked", "cached"])
def test_bytes_arrive(pair: Pair, chunk: int | None, cached: int) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [1, 127, 128, 129, 300], cached)
    run(pair, requests, chunk)
    expect_delivery(pair, requests)
