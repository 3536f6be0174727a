# SPDX-License-Identifier: Apache-2.0
"""The kinds of KV caches that this connector can send, by their names in vLLM and vllm-ascend.

An engine with any other kind is refused when it starts: its caches may look like plain tokens and mean something else.
The same holds for a field that a later version adds to a known kind, unless it has its default value.

Read in vLLM 0.23.0, 0.30.0, 0.32.0 and 0.33.0 (`vllm/v1/kv_cache_interface.py`) and in vllm-ascend 0.23.0 and 0.30.0rc2
(`vllm_ascend/core/kv_cache_interface.py`). Kinds left out on purpose: `CircularBufferSpec`, `KpoolTailSpec` (a ring of
raw keys), `HiSparseHotSpec`, `HiSparseResidentSpec` (copies of a cache in host memory), `HiddenStateCacheSpec` (hidden
states), `CrossAttentionSpec`, `EncoderOnlyAttentionSpec` (an encoder's tokens), `RSWASpec` (drops generated tokens),
`SinkFullAttentionSpec` (has sink tokens of its own), `TQFullAttentionSpec` (quantized by TurboQuant).
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.core.layout import LayoutError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_PACKAGES = ("vllm", "vllm_ascend")

# The kind in which vLLM wraps layers that have specs of their own. Those specs are checked one by one.
_WRAPPER = "UniformTypeKVCacheSpecs"

_KINDS = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "AscendMLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "AscendSlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
    }
)

# Those that may keep one entry for several tokens. The state that an unfinished entry is computed from is a window of
# tokens in a cache of its own.
_COMPRESSED = frozenset({"MLAAttentionSpec", "AscendMLAAttentionSpec"})

# The model in whose caches this holds: `model_version` of some of its layers. Other models may keep what an unfinished
# entry is computed from in another way.
_COMPRESSING_MODEL = "deepseek_v4"

# Fields that the connector reads, and fields without effect on a block's content and memory layout beyond the shapes of
# the registered tensors.
_FIELDS = frozenset(
    {
        # all kinds
        *("block_size", "dcp_sharded", "block_stride_alignment", "is_draft"),
        # attention
        *("num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded", "state_content_bytes"),
        *("max_tp_shards", "sliding_window", "attention_chunk_size", "non_causal", "extra_retained_tokens"),
        # MLA
        *("cache_dtype_str", "alignment", "model_version", "cache_role", "is_index_group_leader"),
        *("non_causal_multi_token_decode", "topk_buffer_width"),
        # vllm-ascend's sparse attention
        *("scale_dim", "scale_dtype", "sparse_head_dim", "cache_sparse_sfa_c8", "cache_sparse_li_c8"),
        *("c8_k_cache_dtype", "c8_k_scale_cache_dtype", "sfa_dcp_replicated_indexer_size"),
        # states
        *("shapes", "dtypes", "mamba_type", "mamba_cache_mode", "num_heads", "tp_replicated"),
        *("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
    }
)

# Other modes keep scales outside the registered tensors, or pack blocks in their own way.
_QUANTIZATIONS = frozenset({"NONE", "FP8_PER_TENSOR"})


def check_kinds(kv_cache_config: "KVCacheConfig") -> None:
    """Raises LayoutError, which names the first layer whose kind of cache is not supported."""
    described = [
        member
        for group in kv_cache_config.kv_cache_groups
        for member in _members(group.layer_names[0], group.kv_cache_spec)
    ]
    compressed = [(layer, spec) for layer, spec in described if _name(spec) in _KINDS and _ratio(spec) != 1]
    if compressed and not any(getattr(spec, "model_version", None) == _COMPRESSING_MODEL for _, spec in described):
        layer, spec = compressed[0]
        raise _refused(layer, f"caches with an entry for {_ratio(spec)} tokens of models other than DeepSeek V4")
    for group in kv_cache_config.kv_cache_groups:
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise _refused(group.layer_names[0], "caches that vLLM keeps in host memory or excludes from transfers")
        for layer, spec in _members(group.layer_names[0], group.kv_cache_spec):
            if (reason := _reason(spec)) is not None:
                raise _refused(layer, reason)


def _refused(layer: str, reason: str) -> LayoutError:
    return LayoutError(
        f"{layer}: {reason} are not supported: serve this model without LayerwisePushConnector, prefill and decode in "
        "one engine"
    )


def _members(layer: str, spec: Any) -> Iterator[tuple[str, Any]]:
    """Yields the layers of a group with their specs. `layer`: the name to use if all have one spec."""
    if _name(spec) == _WRAPPER:
        yield from spec.kv_cache_specs.items()
    else:
        yield layer, spec


def _name(spec: Any) -> str:
    """Returns the kind's name. A class of another package is another kind, even if it has a known name."""
    kind = type(spec)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package in _PACKAGES else f"{kind.__module__}.{kind.__qualname__}"


def _reason(spec: Any) -> str | None:
    name = _name(spec)
    if name not in _KINDS:
        return f"caches of kind {name}"
    ratio = _ratio(spec)
    if not isinstance(ratio, int) or ratio < 1:
        return f"caches that keep several entries for one token ({ratio} tokens for an entry)"
    if ratio > 1 and (name not in _COMPRESSED or (spec.block_size % ratio and not _counts_entries(spec))):
        return f"caches of kind {name} with an entry for {ratio} tokens in blocks of {spec.block_size}"
    quantization = getattr(spec, "kv_quant_mode", None)
    if quantization is not None and quantization.name not in _QUANTIZATIONS:
        return f"caches quantized as {quantization.name} (--kv-cache-dtype)"
    slots = getattr(spec, "num_head_slots", None)
    if slots is not None and slots != spec.num_kv_heads:
        return f"caches that keep {spec.num_kv_heads} KV heads in {slots} slots"
    for each in dataclasses.fields(spec):
        if each.name not in _FIELDS | _CHECKED and getattr(spec, each.name) != _default(each):
            return f"caches of kind {name} with {each.name} {getattr(spec, each.name)!r}"
    return None


_CHECKED = frozenset({"compress_ratio", "tokens_per_state", "kv_quant_mode", "num_head_slots"})


def _default(each: "dataclasses.Field[Any]") -> Any:
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def tokens_per_entry(spec: Any) -> int:
    """Returns how many tokens one entry of a cache is computed from. `spec`: one that `check_kinds` has accepted."""
    return int(_ratio(spec))


def block_tokens(spec: Any) -> int:
    """Returns how many tokens a block of an attention cache stands for. `spec`: as in `tokens_per_entry`."""
    return int(spec.block_size) * (tokens_per_entry(spec) if _counts_entries(spec) else 1)


def _ratio(spec: Any) -> Any:
    """Returns how many tokens an entry is computed from.

    The field is `compress_ratio` in vLLM before 0.30 and in vllm-ascend's own kinds, and `tokens_per_state` later. A
    Mamba layer has one state for all tokens, and -1 there.
    """
    per_state = 1 if hasattr(spec, "mamba_type") else getattr(spec, "tokens_per_state", 1)
    ratio = getattr(spec, "compress_ratio", 1)
    return per_state if ratio in (None, 1) else ratio


def _counts_entries(spec: Any) -> bool:
    """Whether the spec's `block_size` counts entries, as in vllm-ascend 0.23, and not tokens, as in vLLM."""
    return _name(spec) == "AscendMLAAttentionSpec" and getattr(spec, "compress_ratio", 1) not in (None, 1)
