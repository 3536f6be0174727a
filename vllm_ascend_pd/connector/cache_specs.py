# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache specs, translated into this package's cache groups and layer specs."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ascend_pd.connector.cache_kinds import block_tokens, check_kinds, tokens_per_entry
from vllm_ascend_pd.connector.model_summary import draft_summary
from vllm_ascend_pd.connector.vllm_versions import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.caches import CacheGroup, LayerSpec, StateGroup, StateSpec, TokenGroup
from vllm_ascend_pd.core.layout import ALL_TOKENS, LayerState, LayoutError, StatePartition, TokenShare, partition_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Where models' configurations have the number of groups of B and C in their Mamba 2 layers.
_GROUPS_OF_B_AND_C = ("mamba_n_groups", "mamba_ngroups", "n_groups")

# A cache of DeepSeek V4: the name of the attention that it belongs to, and what it is.
_CACHE_OF_V4 = re.compile(r"(.+?)\.(?:attn|swa_cache|compressor|indexer)(?:\.|$)")

_LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def cache_groups(kv_cache_config: "KVCacheConfig", shares: int = 1) -> list[CacheGroup]:
    """Returns the engine's cache groups. `shares`: how many ranks of context parallelism share a request's tokens.

    Raises LayoutError for caches that are not supported.
    """
    check_kinds(kv_cache_config)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True):
        if len({block_tokens(member) for member in _attention(spec)}) > 1:
            raise LayoutError(
                f"{group.layer_names[0]}: a cache group whose layers differ in the tokens of a block is not supported"
            )
        if shares > 1 and not _is_shared(spec):
            raise LayoutError(
                f"{group.layer_names[0]}: with context parallelism caches of kind {type(spec).__name__} are not "
                "supported: its ranks hold copies of them, not shares"
            )
    return [
        StateGroup(spec.block_size)
        if _holds_state(spec)
        else TokenGroup(
            block_tokens(_attention(spec)[0]),
            shares,
            _sees_a_window(spec),
            _longest(spec, "sliding_window"),
            _longest(spec, "attention_chunk_size"),
            min(map(tokens_per_entry, _attention(spec))),
        )
        for spec in specs
    ]


def layer_specs(
    kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig", share: TokenShare = ALL_TOKENS
) -> dict[str, LayerSpec | StateSpec]:
    """Returns what each layer's cache holds, by layer name. `share`: which tokens this rank has.

    Raises LayoutError for caches that are not supported.
    """
    check_kinds(kv_cache_config)
    tp = vllm_config.parallel_config.tensor_parallel_size
    draft = draft_summary(vllm_config)
    models = {"": vllm_config.model_config}
    if draft:
        models[draft] = vllm_config.speculative_config.draft_model_config
    encoding = _encoding(vllm_config.cache_config.cache_dtype)
    specs: dict[str, LayerSpec | StateSpec] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            spec: Any = per_layer[layer] if per_layer is not None else group.kv_cache_spec
            if _holds_state(spec):
                specs[layer] = StateSpec(index, _states(layer, spec, vllm_config))
                continue
            heads = spec.num_kv_heads
            whose = draft if _is_of_draft(layer, vllm_config) else ""
            if "MLA" in type(spec).__name__:
                total = 1
            else:
                model_heads = models[whose].get_total_num_kv_heads()
                total = model_heads if heads == max(1, model_heads // tp) else heads * tp
            ratio = tokens_per_entry(spec)
            specs[layer] = LayerSpec(index, block_tokens(spec), heads, total, encoding, share, whose, ratio)
    return specs


def caches_of_layers(specs: Mapping[str, LayerSpec | StateSpec]) -> dict[str, list[str]]:
    """Returns the caches of layers that have several, by the name that vllm-ascend announces: those of DeepSeek V4.

    It announces a layer once, when all of them are written (`AscendDSAImpl.forward` in `attention/dsa_v1.py`).
    """
    found: dict[str, list[str]] = {}
    if any(isinstance(spec, LayerSpec) and spec.tokens_per_entry > 1 for spec in specs.values()):
        for name in specs:
            if of_v4 := _CACHE_OF_V4.match(name):
                found.setdefault(f"{of_v4[1]}.attn", []).append(name)
    return found


def lost_blocks_say_all(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether lost block ids alone tell vLLM which tokens of a request are left.

    vLLM looks for lost blocks in the first cache group, and counts all tokens before the first of them as computed. A
    window has no blocks for its past, so there vLLM would count too many.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return len(specs) == 1 and not _sees_a_window(specs[0])


def lacks_a_block(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a request of `max_model_len` tokens needs every block, one of which vLLM keeps for itself.

    Version 0.23 starts with so few blocks. Such a request then waits forever, with all requests behind it.
    """
    if HAS_TRANSFER_RESULTS:
        return False
    return bool(get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config) == 1)


def gives_blocks_away(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM takes blocks that have left a window from running requests.

    It does not where it keeps all groups alike: windows are in blocks of full attention then.
    """
    return any(
        _sees_a_window(member) and not isinstance(member, FullAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
        for member in _members(group.kv_cache_spec)
    )


def _members(spec: Any) -> list[Any]:
    """Returns the specs of a group's layers, which may have one each."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _attention(spec: Any) -> list[Any]:
    """Returns the specs of a group's layers that hold KV of tokens."""
    return [member for member in _members(spec) if not _holds_state(member)]


def _sees_a_window(spec: Any) -> bool:
    return any(
        getattr(member, window, None) is not None
        for member in _members(spec)
        for window in ("sliding_window", "attention_chunk_size")
    )


def _longest(spec: Any, window: str) -> int:
    """The longest of one kind of window of a group's layers. 0: there is none, or a layer sees all tokens."""
    if not all(map(_sees_a_window, _members(spec))):
        return 0
    return max(getattr(member, window, None) or 0 for member in _members(spec))


def _is_shared(spec: Any) -> bool:
    """Whether ranks of context parallelism share all tokens of such a cache.

    vllm-ascend may copy the index of sparse attention to every rank.
    """
    return all(
        not _holds_state(member)
        and tokens_per_entry(member) == 1
        and getattr(member, "dcp_sharded", True)
        and getattr(member, "sfa_dcp_replicated_indexer_size", 1) == 1
        for member in _members(spec)
    )


def _is_of_draft(layer: str, vllm_config: "VllmConfig") -> bool:
    """Whether a layer belongs to the draft of speculative decoding.

    vLLM names the layers of draft models and of some heads apart. It numbers those of other heads on from the model's.
    """
    index = _LAYER_INDEX.search(layer)
    behind = index is not None and int(index[1]) >= vllm_config.model_config.hf_text_config.num_hidden_layers
    return behind or not {"draft_model", "mtp"}.isdisjoint(layer.split("."))


def _encoding(cache_dtype: str) -> str | None:
    """Returns what vLLM keeps in a cache whose tensors are of uint8; None for caches of 16 or 32 bits.

    8-bit floats have torch's names, since other backends keep the same in tensors of those types.
    """
    if cache_dtype in ("auto", "float16", "bfloat16", "float32"):
        return None
    return {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(
        cache_dtype, cache_dtype
    )


def _holds_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_type") or any(map(_holds_state, getattr(spec, "kv_cache_specs", {}).values()))


def _states(layer: str, spec: Any, vllm_config: "VllmConfig") -> tuple[LayerState, ...]:
    if spec.mamba_cache_mode != "none":
        if vllm_config.cache_config.enable_prefix_caching:
            remedy = "start prefill and decode with --no-enable-prefix-caching, and without AscendStoreConnector"
        else:
            remedy = (
                "leave AscendStoreConnector out of the MultiConnector: vllm-ascend sets this mode for it, even with "
                "--no-enable-prefix-caching"
            )
        raise LayoutError(
            f"{layer}: its states are kept in mamba_cache_mode {spec.mamba_cache_mode!r}, for prefix caching, which is "
            f"not supported: {remedy}"
        )
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    replicated = getattr(spec, "tp_replicated", False)
    tp = 1 if replicated else vllm_config.parallel_config.tensor_parallel_size
    config = vllm_config.model_config.hf_text_config
    groups = next((getattr(config, name) for name in _GROUPS_OF_B_AND_C if hasattr(config, name)), None)
    partition = StatePartition(spec.mamba_type.name, tp, groups, conv_axis=0 if is_conv_state_dim_first() else 1)
    return tuple(
        LayerState(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize, axis, sections)
        for shape, dtype, (axis, sections) in zip(
            spec.shapes, spec.dtypes, partition_states(partition, spec.shapes), strict=True
        )
    )
