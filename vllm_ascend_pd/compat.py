# SPDX-License-Identifier: Apache-2.0
"""What we read from vLLM's insides, and what differs between the versions supported (0.23.0 and 0.32.0)."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from vllm_ascend_pd.core.groups import CacheGroup, StateGroup, TokenGroup
from vllm_ascend_pd.core.layout import LayoutError
from vllm_ascend_pd.core.states import Dealing, State, dealt_out
from vllm_ascend_pd.worker.caches import LayerSpec, StateSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# From 0.32 on a worker reports completions and failed requests in one object; before, failed blocks beside them.
HAS_TRANSFER_RESULTS = hasattr(base, "KVConnectorTransferResults")


def transfer_results(sent: Collection[str] = (), received: Collection[str] = (), failed: Collection[str] = ()) -> Any:
    return base.KVConnectorTransferResults(set(sent), set(received), set(failed))


def accept_lost_blocks_of_several_groups() -> None:
    """Lets the scheduler of vLLM 0.23 fail a request whose cache has several groups, as 0.32's does by itself.

    0.23 has nothing but block ids to be told of failures by, and its engine ends when it is told some of a model
    with several groups: it looks for them in the first. The groups share one block pool, so an id that was not
    cached before belongs to one request, in whichever group.
    """
    if HAS_TRANSFER_RESULTS:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    of_one_group = Scheduler._handle_invalid_blocks
    if of_one_group.__module__ == __name__:
        return

    def handle_invalid_blocks(self: Any, lost: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        if len(self.kv_cache_config.kv_cache_groups) == 1:
            failed: set[str] = of_one_group(self, lost, num_scheduled_tokens)
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


def cache_groups(kv_cache_config: "KVCacheConfig") -> list[CacheGroup]:
    """What each cache group's blocks hold."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [StateGroup(spec.block_size) if _holds_state(spec) else TokenGroup(spec.block_size) for spec in specs]


def layer_specs(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> dict[str, LayerSpec | StateSpec]:
    """What each layer's cache holds on this rank. Raises LayoutError for a kind of cache not supported."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    model_heads = vllm_config.model_config.get_total_num_kv_heads()
    specs: dict[str, LayerSpec | StateSpec] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            spec: Any = per_layer[layer] if per_layer is not None else group.kv_cache_spec
            if _holds_state(spec):
                specs[layer] = StateSpec(index, _states(layer, spec, vllm_config))
                continue
            heads = getattr(spec, "num_kv_heads", None)
            if heads is None:
                raise LayoutError(f"{layer}: caches of kind {type(spec).__name__} are not supported")
            if "MLA" in type(spec).__name__:
                total = 1
            else:
                total = model_heads if heads == max(1, model_heads // tp) else heads * tp
            specs[layer] = LayerSpec(index, spec.block_size, heads, total)
    return specs


def _holds_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_type") or any(map(_holds_state, getattr(spec, "kv_cache_specs", {}).values()))


def _states(layer: str, spec: Any, vllm_config: "VllmConfig") -> tuple[State, ...]:
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
    dealing = Dealing(spec.mamba_type.name, tp, groups, conv_axis=0 if is_conv_state_dim_first() else 1)
    return tuple(
        State(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize, axis, sections)
        for shape, dtype, (axis, sections) in zip(
            spec.shapes, spec.dtypes, dealt_out(dealing, spec.shapes), strict=True
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
