# SPDX-License-Identifier: Apache-2.0
"""The kinds of KV caches that this connector can send, and their specs as this package's cache groups and layer specs.

An engine with any other kind is refused when it starts: its caches may look like plain tokens and mean something else.
The same holds for a field that a later version adds to a known kind, unless it has its default value.

Read in vLLM 0.23.0, 0.30.0, 0.32.0 and 0.33.0 (`vllm/v1/kv_cache_interface.py`) and in vllm-ascend 0.23.0 and 0.30.0rc2
(`vllm_ascend/core/kv_cache_interface.py`). Kinds left out on purpose: `CircularBufferSpec`, `AscendCircularBufferSpec`,
`KpoolTailSpec`, `AscendIndexerKPoolTailSpec` (rings of keys), `HiSparseHotSpec`, `HiSparseResidentSpec` (copies of a
cache in host memory), `HiddenStateCacheSpec` (hidden states), `CrossAttentionSpec`, `EncoderOnlyAttentionSpec` (an
encoder's tokens), `RSWASpec` (drops generated tokens), `SinkFullAttentionSpec` (has sink tokens of its own),
`TQFullAttentionSpec` (quantized by TurboQuant).
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ascend_pd.connector.model import draft_summary
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.caches import BlockNeeds, CacheGroup, StateGroup, StateSpec, TokenGroup
from vllm_ascend_pd.core.layout import ALL_TOKENS, LayerSpec, LayoutError, TokenShare
from vllm_ascend_pd.core.states import LayerState, partition_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


_PACKAGES = ("vllm", "vllm_ascend")

# The kind in which vLLM wraps layers that have specs of their own. Those specs are checked one by one.
_WRAPPER = "UniformTypeKVCacheSpecs"

_KINDS = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "AscendMLAAttentionSpec",
        "AscendSFAIndexerCacheSpec",
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
    described: list[tuple[str, Any]] = []
    for group in kv_cache_config.kv_cache_groups:
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise _refused(group.layer_names[0], "caches that vLLM keeps in host memory or excludes from transfers")
        described += _layers_of(group).items()
    compressed = [(layer, spec) for layer, spec in described if _name(spec) in _KINDS and _ratio(spec) != 1]
    if compressed and not any(getattr(spec, "model_version", None) == _COMPRESSING_MODEL for _, spec in described):
        layer, spec = compressed[0]
        raise _refused(layer, f"caches with an entry for {_ratio(spec)} tokens of models other than DeepSeek V4")
    for layer, spec in described:
        if (reason := _reason(spec)) is not None:
            raise _refused(layer, reason)


def _refused(layer: str, reason: str) -> LayoutError:
    return LayoutError(
        f"{layer}: {reason} are not supported: serve this model without LayerwisePushConnector, prefill and decode in "
        "one engine"
    )


def _layers_of(group: "KVCacheGroupSpec") -> dict[str, Any]:
    """Returns a group's layers, each with its spec."""
    spec: Any = group.kv_cache_spec
    return dict(spec.kv_cache_specs) if _name(spec) == _WRAPPER else dict.fromkeys(group.layer_names, spec)


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


# Where models' configurations have the number of groups of B and C in their Mamba 2 layers.
_GROUPS_OF_B_AND_C = ("mamba_n_groups", "mamba_ngroups", "n_groups")

# A cache of DeepSeek V4: the name of the attention that it belongs to, and what it is.
_CACHE_OF_V4 = re.compile(r"(.+?)\.(?:attn|swa_cache|compressor|indexer)(?:\.|$)")

# The keys of sparse attention's index, which vllm-ascend keeps in a cache of its own from version 0.30 on.
_INDEX_OF_SPARSE = re.compile(r"(.+)\.indexer\.k_cache")

_MTP_INDEX = re.compile(r"(?:^|\.)mtp(?:\.layers)?\.(\d+)(?:\.|$)")

_LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def cache_groups(kv_cache_config: "KVCacheConfig", shares: int = 1) -> list[CacheGroup]:
    """Returns the engine's cache groups. `shares`: how many ranks of context parallelism share a request's tokens.

    Raises LayoutError for caches that are not supported.
    """
    check_kinds(kv_cache_config)
    found: list[CacheGroup] = []
    for group in kv_cache_config.kv_cache_groups:
        first, specs = group.layer_names[0], list(_layers_of(group).values())
        if shares > 1 and not all(map(_is_shared, specs)):
            raise LayoutError(
                f"{first}: with context parallelism caches of kind {type(group.kv_cache_spec).__name__} are not "
                "supported: its ranks hold copies of them, not shares"
            )
        if any(map(_holds_state, specs)):
            found.append(StateGroup(group.kv_cache_spec.block_size))
            continue
        if len({block_tokens(spec) for spec in specs}) > 1:
            raise LayoutError(f"{first}: a cache group whose layers differ in the tokens of a block is not supported")
        windowed = [_sees_a_window(spec) for spec in specs]
        window, chunk = (
            # The longest. 0: there is none, or a layer sees all tokens.
            max(getattr(spec, kind, None) or 0 for spec in specs) if all(windowed) else 0
            for kind in _WINDOWS
        )
        per_entry = min(map(tokens_per_entry, specs))
        found.append(TokenGroup(block_tokens(specs[0]), shares, any(windowed), window, chunk, per_entry))
    return found


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
        for layer, spec in _layers_of(group).items():
            if _holds_state(spec):
                specs[layer] = StateSpec(index, _states(layer, spec, vllm_config))
                continue
            heads = spec.num_kv_heads
            whose = draft if _is_of_draft(layer, vllm_config) else ""
            if any("MLA" in kind.__name__ for kind in type(spec).__mro__):
                total = 1
            else:
                model_heads = models[whose].get_total_num_kv_heads()
                total = model_heads if heads == max(1, model_heads // tp) else heads * tp
            ratio = tokens_per_entry(spec)
            of = LayerSpec(index, block_tokens(spec), heads, total, encoding, share, whose, ratio)
            copies = getattr(spec, "sfa_dcp_replicated_indexer_size", 1)
            specs[layer] = dataclasses.replace(of, copied_from=index_of_sparse(spec), copies=copies)
    return specs


def caches_of_layers(specs: Mapping[str, LayerSpec | StateSpec]) -> dict[str, list[str]]:
    """Returns the caches of layers that have several, by the name that vllm-ascend announces.

    It announces such a layer once, when all of them are written: DeepSeek V4's (`AscendDSAImpl.forward` in
    `attention/dsa_v1.py`), and from 0.30 on sparse attention with its index (`attention/sfa_v1.py`).
    """
    found: dict[str, list[str]] = {}
    compressed = any(isinstance(spec, LayerSpec) and spec.tokens_per_entry > 1 for spec in specs.values())
    for name in specs:
        if compressed and (of_v4 := _CACHE_OF_V4.match(name)):
            found.setdefault(f"{of_v4[1]}.attn", []).append(name)
        elif (index := _INDEX_OF_SPARSE.fullmatch(name)) and (attention := f"{index[1]}.attn") in specs:
            found[attention] = [attention, name]
    return found


def layers_in_order(names: Iterable[str]) -> list[list[str]]:
    """Returns the caches of each layer of this rank, in the order in which vllm-ascend counts layers.

    It counts by the number in their names, and MTP layers after the others (`layerwise_cache_layout.py`).
    """
    found: dict[tuple[bool, int], list[str]] = {}
    for name in names:
        of_mtp = _MTP_INDEX.search(name)
        number = of_mtp or _LAYER_INDEX.search(name)
        found.setdefault((of_mtp is not None, int(number[1]) if number else 0), []).append(name)
    return [found[place] for place in sorted(found)]


def readers_of_others(vllm_config: "VllmConfig") -> frozenset[str] | None:
    """Returns the layers that read another layer's cache. None: all layers at one address do.

    From version 0.30 on, vllm-ascend may have layers use a few buffers in turn on prefill (`layerwise_cache_layout.py`,
    `layerwise_num_shared_buffers`). It says so nowhere but by equal addresses. A layer that reads another's cache says
    so itself.
    """
    if not HAS_TRANSFER_RESULTS:  # a vLLM before 0.30
        return None
    layers = vllm_config.compilation_config.static_forward_context
    return frozenset(name for name, layer in layers.items() if getattr(layer, "kv_sharing_target_layer_name", None))


def lost_blocks_say_all(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether lost block ids alone tell vLLM which tokens of a request are left.

    vLLM looks for lost blocks in the first cache group, and counts all tokens before the first of them as computed. A
    window has no blocks for its past, so there vLLM would count too many.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and not any(map(_sees_a_window, _layers_of(groups[0]).values()))


def block_needs(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", groups: Sequence[CacheGroup]
) -> BlockNeeds:
    """Returns how many blocks requests take, as vLLM counts them. `groups`: of `cache_groups`."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    most = [math.ceil(spec.max_memory_usage_bytes(vllm_config) / spec.page_size_bytes) for spec in specs]
    pool = kv_cache_config.num_blocks - 1  # vLLM keeps one for itself
    return BlockNeeds(tuple(zip(groups, most, strict=True)), pool, vllm_config.num_speculative_tokens)


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
        _sees_a_window(spec) and not isinstance(spec, FullAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
        for spec in _layers_of(group).values()
    )


_WINDOWS = ("sliding_window", "attention_chunk_size")


def _sees_a_window(spec: Any) -> bool:
    return any(getattr(spec, kind, None) is not None for kind in _WINDOWS)


def _is_shared(spec: Any) -> bool:
    """Whether ranks of context parallelism share the tokens of such a cache, or each has states of its own heads."""
    return tokens_per_entry(spec) == 1 and getattr(spec, "dcp_sharded", True)


def index_of_sparse(spec: Any) -> int | None:
    """Returns which tensor of a layer is the first of sparse attention's index. None if there is no index.

    vllm-ascend keeps all of it on each rank of decode context parallelism (`attention/context_parallel/sfa_cp.py`). It
    is behind the latent and the rope, which may be one tensor. From 0.30 on, it is a cache of its own.
    """
    if _name(spec) == "AscendSFAIndexerCacheSpec":
        return 0
    if not hasattr(spec, "sfa_dcp_replicated_indexer_size") or spec.sparse_head_dim is None:
        return None
    return 1 if spec.cache_sparse_sfa_c8 else 2


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
    return hasattr(spec, "mamba_type")


def _states(layer: str, spec: Any, vllm_config: "VllmConfig") -> tuple[LayerState, ...]:
    _check_mode(layer, spec, vllm_config)
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    replicated = getattr(spec, "tp_replicated", False)
    tp = 1 if replicated else vllm_config.parallel_config.tensor_parallel_size
    config = vllm_config.model_config.hf_text_config
    groups = next((getattr(config, name) for name in _GROUPS_OF_B_AND_C if hasattr(config, name)), None)
    conv_axis = 0 if is_conv_state_dim_first() else 1
    partition = partition_states(spec.mamba_type.name, tp, groups, conv_axis, spec.shapes)
    return tuple(
        LayerState(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize, axis, sections)
        for shape, dtype, (axis, sections) in zip(spec.shapes, spec.dtypes, partition, strict=True)
    )


def _check_mode(layer: str, spec: Any, vllm_config: "VllmConfig") -> None:
    """Raises LayoutError unless states are cached as here or not at all: whole blocks, in `mamba_cache_mode` align."""
    cache, mode = vllm_config.cache_config, spec.mamba_cache_mode
    if mode == "none":
        return
    remedy = None
    if mode != "align":
        remedy = f"in mamba_cache_mode {mode!r}: use --mamba-cache-mode align, or --no-enable-prefix-caching"
    elif not cache.enable_prefix_caching:
        remedy = (
            "in mamba_cache_mode 'align' without prefix caching: leave AscendStoreConnector out of the MultiConnector, "
            "for which vllm-ascend sets this mode even with --no-enable-prefix-caching"
        )
    elif getattr(cache, "prefix_match_unit", None) not in (None, spec.block_size):
        remedy = "for prefixes that end within a block: leave out --prefix-match-unit"
    if remedy is not None:
        raise LayoutError(f"{layer}: its states are cached in a way that is not supported, {remedy}")
