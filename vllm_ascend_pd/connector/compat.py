# SPDX-License-Identifier: Apache-2.0
"""What we read from vLLM's insides, and what differs between the versions supported (0.23.0 and 0.32.0)."""

import re
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.version import __version__ as vllm_version

from vllm_ascend_pd.connector.cache_kinds import check_kinds
from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.caches import LayerSpec, StateSpec
from vllm_ascend_pd.core.groups import CacheGroup, StateGroup, TokenGroup
from vllm_ascend_pd.core.layout import ALL_TOKENS, LayoutError, TokenShare
from vllm_ascend_pd.core.states import LayerState, StatePartition, partition_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# From 0.32 on a worker reports completions and failed requests in one object; before, failed blocks beside them.
HAS_TRANSFER_RESULTS = hasattr(base, "KVConnectorTransferResults")

# From 0.32 on a step's output names every request that was preempted. Before, not those of a prefix cache reset, and
# vllm-ascend's SchedulerDynamicBatch names none.
NAMES_ALL_PREEMPTED = HAS_TRANSFER_RESULTS

# From 0.32 on in every step; before, only where a rank has some too, be they empty.
ASKS_SCHEDULER_FOR_STATS = hasattr(KVConnectorStats, "to_dict")

# From 0.32 on vLLM counts cached tokens by where they came from; these came from another engine. None before.
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    FROM_ANOTHER_ENGINE = None
else:
    FROM_ANOTHER_ENGINE = CacheHitSource.P2P


def prefill_ranks_hold_copies() -> bool:
    """Whether ranks of prefill context parallelism all hold the same KV, as from 0.30 on. In 0.23 they share a
    request's tokens: each has memory for its part of the longest request alone, which is what is asked here."""
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(max_model_len=2))
    one_token = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    return bool(one_token.max_memory_usage_bytes(config) == 2 * one_token.page_size_bytes)


def transfer_results(sent: Collection[str] = (), received: Collection[str] = (), failed: Collection[str] = ()) -> Any:
    return base.KVConnectorTransferResults(set(sent), set(received), set(failed))


def lost_blocks_say_all(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM finds out by itself what a request has left when it is told its lost blocks. It looks for them in
    the first cache group, and takes all before the first of them for computed: a window's past, too, which is none of
    its blocks."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return len(specs) == 1 and not _sees_a_window(specs[0])


def lacks_a_block(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a request of `max_model_len` tokens takes every block, one of which vLLM keeps for itself. Version 0.23
    starts with so few, and such a request, with all that are behind it, waits for ever."""
    if HAS_TRANSFER_RESULTS:
        return False
    return bool(get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config) == 1)


def accept_lost_blocks_of_any_groups() -> None:
    """Lets the scheduler of vLLM 0.23 fail a request whose lost blocks do not say all, as 0.32's does by itself.

    0.23 has nothing but block ids to be told of failures by, and its engine ends when it is told some of a model
    with several groups. The groups share one block pool, so an id that was not cached before belongs to one request,
    in whichever group.
    """
    if HAS_TRANSFER_RESULTS:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    by_blocks = Scheduler._handle_invalid_blocks
    if by_blocks.__module__ == __name__:
        return

    def handle_invalid_blocks(self: Any, lost: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        if lost_blocks_say_all(self.kv_cache_config):
            failed: set[str] = by_blocks(self, lost, num_scheduled_tokens)
            return failed
        waiting = [r for r in self.skipped_waiting if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        hit = [r for r in waiting if any(map(lost.intersection, self.kv_cache_manager.get_block_ids(r.request_id)))]
        failed = {request.request_id for request in hit}
        if not self.recompute_kv_load_failures:
            return failed
        for request in hit:
            request.num_computed_tokens = 0
        self.failed_recving_kv_req_ids |= failed
        return set()

    Scheduler._handle_invalid_blocks = handle_invalid_blocks


def keep_cached_blocks_until_all_groups_have_theirs() -> None:
    """Lets vLLM 0.23 allocate for tokens that come from elsewhere as 0.32 does: of a request of which some blocks are
    cached, none of the cached ones.

    0.23 goes through the cache groups one by one, each taking its cached blocks first and new ones then: new ones of
    one group may be cached blocks of the next, and prefill would write both groups' KV into them.
    """
    if HAS_TRANSFER_RESULTS:
        return
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    by_groups = KVCacheCoordinator.allocate_new_computed_blocks
    if by_groups.__module__ == __name__:
        return

    def allocate_new_computed_blocks(
        self: Any,
        request_id: str,
        new_computed_blocks: "tuple[Sequence[KVCacheBlock], ...]",
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        tokens = num_local_computed_tokens + num_external_computed_tokens
        kept: list[KVCacheBlock] = []
        if num_external_computed_tokens:
            for manager, cached in zip(self.single_type_managers, new_computed_blocks, strict=True):
                # What has left a window is not taken.
                skipped = manager.get_num_skipped_tokens(tokens) // manager.block_size
                kept += [block for block in cached[skipped:] if not block.is_null]
        self.block_pool.touch(kept)
        by_groups(self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens)
        self.block_pool.free_blocks(reversed(kept))

    KVCacheCoordinator.allocate_new_computed_blocks = allocate_new_computed_blocks


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
    return _summary(vllm_config.model_config)


def draft_summary(vllm_config: "VllmConfig") -> str:
    """The same of the model or head that drafts, if it has caches of its own; "" if nothing has."""
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return ""
    return f"{speculative.method} {_summary(speculative.draft_model_config)}"


def _summary(model: "ModelConfig") -> str:
    text = model.hf_text_config
    architecture = (getattr(model.hf_config, "architectures", None) or ["?"])[0]
    return (
        f"{architecture} with {text.num_hidden_layers} layers of hidden size {text.hidden_size}, "
        f"{text.num_attention_heads} heads, {model.get_total_num_kv_heads()} KV heads, vocabulary {text.vocab_size}"
    )


def media_hashing(vllm_config: "VllmConfig") -> str:
    """How vLLM makes the hashes of images, sounds and videos; "" if it names them itself, with neither of the caches
    on that look for them. The model's path goes into a hash, and versions write what they hash differently."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return ""
    if not multimodal.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        return ""
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None) or envs.VLLM_MM_HASHER_ALGORITHM
    return f"{vllm_version.partition('+')[0]} {algorithm} {vllm_config.model_config.model}"


def sharding(vllm_config: "VllmConfig") -> topology.Sharding:
    """How the ranks of a pipeline stage share its KV."""
    parallel = vllm_config.parallel_config
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    pcp = parallel.prefill_context_parallel_size
    interleave = parallel.cp_kv_cache_interleave_size
    if dcp > 1 and parallel.dcp_kv_cache_interleave_size > 1:  # its deprecated name, which vLLM prefers
        interleave = parallel.dcp_kv_cache_interleave_size
    if pcp > 1 and prefill_ranks_hold_copies():
        # Groups of decode context parallelism run over prefill-context-parallel ranks first.
        shares = tuple((tp_rank * pcp + pcp_rank) % dcp for pcp_rank in range(pcp) for tp_rank in range(tp))
        return topology.Sharding(tp, shares, interleave if dcp > 1 else 1)
    return topology.sharding(tp, dcp, interleave, pcp)


def place_in_stage() -> tuple[int, tuple[int, ...]]:
    """This rank's number in its pipeline stage, as `Sharding` counts, and that stage's ranks in the world, in order.

    vLLM numbers the world with tensor-parallel ranks running fastest, then those of prefill context parallelism.
    """
    tp, pcp = parallel_state.get_tp_group(), parallel_state.get_pcp_group()
    rank = pcp.rank_in_group * tp.world_size + tp.rank_in_group
    first = tp.ranks[tp.rank_in_group] - rank
    return rank, tuple(range(first, first + pcp.world_size * tp.world_size))


def cache_groups(kv_cache_config: "KVCacheConfig", shares: int = 1) -> list[CacheGroup]:
    """What each cache group's blocks hold, where tokens are dealt out in `shares`. Raises LayoutError."""
    check_kinds(kv_cache_config)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True):
        if shares > 1 and not _is_shared(spec):
            raise LayoutError(
                f"{group.layer_names[0]}: with context parallelism caches of kind {type(spec).__name__} are not "
                "supported: its ranks hold copies of them, not shares"
            )
    return [
        StateGroup(spec.block_size) if _holds_state(spec) else TokenGroup(spec.block_size, shares, _sees_a_window(spec))
        for spec in specs
    ]


def _members(spec: Any) -> list[Any]:
    """A group's layers may have specs of their own."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _sees_a_window(spec: Any) -> bool:
    return any(
        getattr(member, window, None) is not None
        for member in _members(spec)
        for window in ("sliding_window", "attention_chunk_size")
    )


def gives_blocks_away(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether requests that run lose blocks that have left a window. Not where vLLM keeps all groups alike: it has
    windows in blocks of full attention then."""
    return any(
        _sees_a_window(member) and not isinstance(member, FullAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
        for member in _members(group.kv_cache_spec)
    )


def _is_shared(spec: Any) -> bool:
    """Whether context parallelism deals out the tokens of such a cache, all of it. vllm-ascend may copy the index of
    sparse attention to every rank."""
    return all(
        not _holds_state(member)
        and getattr(member, "dcp_sharded", True)
        and getattr(member, "sfa_dcp_replicated_indexer_size", 1) == 1
        for member in _members(spec)
    )


def layer_specs(
    kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig", share: TokenShare = ALL_TOKENS
) -> dict[str, LayerSpec | StateSpec]:
    """What each layer's cache holds on a rank with `share` of the tokens. Raises LayoutError for a kind of cache not
    supported."""
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
            specs[layer] = LayerSpec(index, spec.block_size, heads, total, encoding, share, whose)
    return specs


_LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _is_of_draft(layer: str, vllm_config: "VllmConfig") -> bool:
    """Whether a layer belongs to speculative decoding's draft. Where vLLM has one, it names a draft model's and some
    heads' layers apart, and numbers those of other heads on from the model's."""
    index = _LAYER_INDEX.search(layer)
    behind = index is not None and int(index[1]) >= vllm_config.model_config.hf_text_config.num_hidden_layers
    return behind or not {"draft_model", "mtp"}.isdisjoint(layer.split("."))


def _encoding(cache_dtype: str) -> str | None:
    """What vLLM keeps in a cache whose tensors are of uint8; None where it has none of those.

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
        raise LayoutError(
            f"{layer}: its states are kept in mamba_cache_mode {spec.mamba_cache_mode!r}, for prefix caching, which is "
            "not supported: start prefill and decode with --no-enable-prefix-caching"
        )
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    replicated = getattr(spec, "tp_replicated", False)
    tp = 1 if replicated else vllm_config.parallel_config.tensor_parallel_size
    config = vllm_config.model_config.hf_text_config
    groups = next((getattr(config, name) for name in _GROUPS_OF_B_AND_C if hasattr(config, name)), None)
    dealing = StatePartition(spec.mamba_type.name, tp, groups, conv_axis=0 if is_conv_state_dim_first() else 1)
    return tuple(
        LayerState(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize, axis, sections)
        for shape, dtype, (axis, sections) in zip(
            spec.shapes, spec.dtypes, partition_states(dealing, spec.shapes), strict=True
        )
    )


# Where models' configurations say how many groups of B and C their Mamba 2 layers have.
_GROUPS_OF_B_AND_C = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def drop_last_prompt_token(request: "Request") -> None:
    """Makes prefill stop one token short, before the request is allocated: where layers keep a state, decode must
    get the one before the last token, which it computes itself. (vLLM's own connectors do the same.)"""
    for tokens in (request.prompt_token_ids, request._all_token_ids):
        if tokens is not None:
            del tokens[-1:]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    request.num_prompt_tokens -= 1
