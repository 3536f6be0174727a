# SPDX-License-Identifier: Apache-2.0
"""What we read from vLLM's insides, and what differs between the versions supported (0.23.0 and 0.32.0)."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from vllm_ascend_pd.core.layout import LayoutError
from vllm_ascend_pd.worker.caches import LayerSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# From 0.32 on a worker reports completions and failed requests in one object; before, failed blocks beside them.
HAS_TRANSFER_RESULTS = hasattr(base, "KVConnectorTransferResults")


def transfer_results(sent: Collection[str] = (), received: Collection[str] = (), failed: Collection[str] = ()) -> Any:
    return base.KVConnectorTransferResults(set(sent), set(received), set(failed))


# vLLM names child `i` of a request with n > 1 `i_<id>`, and appends 8 random characters to every id.
_CHILD_PREFIX = re.compile(r"^\d+_(?=(cmpl|chatcmpl|resp)-)")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def external_request_id(request_id: str) -> str:
    """The id that the API server gave the request, which is how a proxy knows it."""
    external = _CHILD_PREFIX.sub("", request_id)
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        external = _RANDOM_SUFFIX.sub("", external)
    return external


def model_summary(vllm_config: "VllmConfig") -> str:
    """The model's shape in one line: what must be equal on both sides for their caches to mean the same."""
    model = vllm_config.model_config
    text = model.hf_text_config
    architecture = (getattr(model.hf_config, "architectures", None) or ["?"])[0]
    return (
        f"{architecture} with {text.num_hidden_layers} layers of hidden size {text.hidden_size}, "
        f"{text.num_attention_heads} heads, {model.get_total_num_kv_heads()} KV heads, vocabulary {text.vocab_size}"
    )


def unsupported(vllm_config: "VllmConfig") -> str | None:
    """A setting of the platform's under which caches do not hold what they seem to; None if there is none."""
    additional = getattr(vllm_config, "additional_config", None) or {}
    if additional.get("enable_kv_nz"):
        return "additional_config has enable_kv_nz: KV in NZ order cannot be sent, prefill writes it in plain order"
    return None


def group_block_sizes(kv_cache_config: "KVCacheConfig") -> list[int]:
    """Tokens per block of each cache group."""
    return [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]


def layer_specs(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> dict[str, LayerSpec]:
    """What each layer's cache holds on this rank. Raises LayoutError for a kind of cache not supported."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    model_heads = vllm_config.model_config.get_total_num_kv_heads()
    specs = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            spec: Any = per_layer[layer] if per_layer is not None else group.kv_cache_spec
            heads = getattr(spec, "num_kv_heads", None)
            if heads is None:
                raise LayoutError(f"{layer}: caches of kind {type(spec).__name__} are not supported")
            if "MLA" in type(spec).__name__:
                total = 1
            else:
                total = model_heads if heads == max(1, model_heads // tp) else heads * tp
            specs[layer] = LayerSpec(index, spec.block_size, heads, total)
    return specs
