# SPDX-License-Identifier: Apache-2.0
"""Layers whose KV vllm-ascend's decode engines keep in int8: C8 (dense attention) and FAKQuant (MLA).

A prefill engine of the same checkpoint keeps 16 bits and has the same scales, so it quantizes what it sends. The decode
engines cannot compute prompts.

Read in vllm-ascend 0.23.0 and 0.30.0rc2: `modelslim_config.py` and `kv_c8.py` in `quantization/`,
`attention/attention_v1.py`, `attention/mla_v1.py`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_ascend_pd.connector.unsupported import NO_PROMPTS_WITH_INT8, computes_prompts
from vllm_ascend_pd.core.caches import Quantize, StateSpec
from vllm_ascend_pd.core.layout import LayerSpec, LayoutError, Packing
from vllm_ascend_pd.device.packing import quantize_c8

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_C8 = (Packing.INT8_NZ, Packing.INT8_NZ)
# MLA's latent and rope.
_FAKQUANT = (Packing.INT8_NZ, Packing.NZ)


def int8_caches(
    specs: Mapping[str, LayerSpec | StateSpec], vllm_config: "VllmConfig", prefills: bool
) -> tuple[dict[str, LayerSpec | StateSpec], dict[tuple[str, int], Quantize]]:
    """Returns the specs with what decode keeps in int8, and on prefill what quantizes it, by layer and part.

    Call it when the weights are loaded. Raises LayoutError for layers whose scales are not where they are expected, and
    for a decode engine that would compute prompts and cannot.
    """
    found, quantize = dict(specs), dict[tuple[str, int], Quantize]()
    for name, spec in specs.items():
        packings = _packings(name, vllm_config.quant_config)
        if not packings or not isinstance(spec, LayerSpec):
            continue
        if not prefills and computes_prompts(vllm_config):
            raise LayoutError(f"{name}: {NO_PROMPTS_WITH_INT8}")
        layer = vllm_config.compilation_config.static_forward_context[name]
        try:
            if packings is _C8:
                scales = (
                    _fingerprint(layer.k_cache_scale, layer.k_cache_offset),
                    _fingerprint(layer.v_cache_scale, layer.v_cache_offset),
                )
                functions: list[Quantize] = [partial(_c8, layer, "k"), partial(_c8, layer, "v")]
            else:
                scales = (_fingerprint(layer.fak_descale, layer.fak_offset), "")
                functions = [partial(_fakquant, layer)]
        except AttributeError as error:
            raise LayoutError(
                f"{name}: its checkpoint has scales for KV in int8, the layer has none: {error}"
            ) from None
        found[name] = replace(spec, packings=packings, is_packed=not prefills, scales=scales)
        if prefills:
            quantize.update({(name, part): function for part, function in enumerate(functions)})
    return found, quantize


def _packings(name: str, config: Any) -> tuple[Packing, ...]:
    """Returns how decode keeps the tensors of a layer; () if it keeps them as prefill does.

    `config`: vllm-ascend's `AscendModelSlimConfig`; any other has no such layers.
    """
    if getattr(config, "enable_fa_quant", False) and config.is_fa_quant_layer(name):
        return _FAKQUANT
    if getattr(config, "enable_c8_quant", False) and config.is_c8_quant_layer(name):
        return _C8
    return ()


def _fingerprint(*tensors: torch.Tensor) -> str:
    """Returns a digest of a layer's scales, which are those of all heads on every rank."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tensor.numel()}\n".encode())
        digest.update(tensor.detach().flatten().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _c8(layer: Any, which: str, kv: torch.Tensor) -> torch.Tensor:
    """Quantizes K or V by what the layer's attention has made of its scales, in its first forward pass."""
    return quantize_c8(kv, getattr(layer, f"_c8_{which}_inv_scale"), getattr(layer, f"_c8_{which}_offset"))


def _fakquant(layer: Any, kv: torch.Tensor) -> torch.Tensor:
    quantized: torch.Tensor = torch.ops.vllm.quantize(
        kv, layer.fak_descale, layer.fak_descale_reciprocal, layer.fak_offset
    )
    return quantized
