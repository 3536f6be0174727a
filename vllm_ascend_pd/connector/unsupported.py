# SPDX-License-Identifier: Apache-2.0
"""Settings that would make KV or answers wrong without any sign. An engine that has one is refused when it starts."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.patches import vllm_0_33_lost_steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def unsupported(vllm_config: "VllmConfig") -> str | None:
    """Returns the first setting of an engine that is refused, and why; None if there is none."""
    return next(_reasons(vllm_config), None)


def survives_faults(vllm_config: "VllmConfig") -> bool:
    """Whether the engine goes on after a step has failed. vLLM 0.23 does not have the option."""
    return bool(getattr(vllm_config.parallel_config, "enable_fault_tolerance", False))


def computes_prompts(vllm_config: "VllmConfig") -> bool:
    """Whether a decode engine computes prompts: what `who_computes` says, if it is set.

    Otherwise vllm-ascend's `recompute_scheduler_enable` decides. With it, vllm-ascend plans graphs, buffers and
    collectives for an engine that computes none.
    """
    said = _who_computes(vllm_config)
    return said != "never" and (said is not None or not _plans_without_prompts(vllm_config))


def _who_computes(vllm_config: "VllmConfig") -> Any:
    return (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("who_computes")


def _plans_without_prompts(vllm_config: "VllmConfig") -> bool:
    additional = getattr(vllm_config, "additional_config", None) or {}
    return has_recompute_scheduler(additional)


def has_recompute_scheduler(additional: Mapping[str, Any]) -> bool:
    """Returns whether `additional_config` has vllm-ascend's recompute scheduler. From 0.30 on it is in
    `scheduler_config` there, which comes first."""
    name, scheduler = "recompute_scheduler_enable", additional.get("scheduler_config")
    places = (scheduler, additional) if isinstance(scheduler, Mapping) else (additional,)
    return bool(next((place[name] for place in places if name in place), False))


def _reasons(vllm_config: "VllmConfig") -> Iterator[str]:
    additional = getattr(vllm_config, "additional_config", None) or {}
    if additional.get("enable_kv_nz"):
        yield "additional_config has enable_kv_nz: KV in NZ order cannot be sent, prefill writes it in plain order"
    cache = vllm_config.cache_config  # vLLM 0.30 does not have the option
    if getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype).startswith("fp8"):
        yield (
            f"--calculate-kv-scales is set with --kv-cache-dtype {cache.cache_dtype}: each engine would compute scales "
            "of its own from its first tokens, and read the other's KV with them. Use a checkpoint that has scales"
        )
    if survives_faults(vllm_config) and not vllm_0_33_lost_steps.fits():
        yield (
            "--enable-fault-tolerance is set: before 0.33, vLLM forgets steps that are on their way when one fails, so "
            "it is not known which blocks may be freed. Leave it out: after a fault the engine ends, and the proxy "
            "retries its requests"
        )
    if vllm_config.kv_transfer_config.is_kv_consumer:
        yield from _reasons_on_decode(vllm_config, additional)


def _reasons_on_decode(vllm_config: "VllmConfig", additional: dict[str, Any]) -> Iterator[str]:
    parallel, graphs = vllm_config.parallel_config, vllm_config.compilation_config.cudagraph_mode
    if parallel.prefill_context_parallel_size > 1:
        yield (
            f"prefill_context_parallel_size is {parallel.prefill_context_parallel_size} on a decode engine, which is "
            "not supported: use decode_context_parallel_size"
        )
    if _returns_routed_experts(vllm_config):
        yield (
            "--enable-return-routed-experts is set on a decode engine: prefill computes the prompt, and the experts of "
            "the prompt's tokens are not sent. Decode would answer without them"
        )
    if _plans_without_prompts(vllm_config) and computes_prompts(vllm_config):
        yield (
            "additional_config has recompute_scheduler_enable, with which vllm-ascend plans for a decode engine that "
            f"computes no prompts, and who_computes is {_who_computes(vllm_config)}: leave who_computes out, or set it "
            "to never"
        )
    if (additional.get("hamming_sparse") or {}).get("enabled"):
        yield (
            "additional_config has hamming_sparse on a decode engine: it chooses blocks by hashes of the tokens that "
            "this engine has computed itself, and prefill sends none"
        )
    # The first step after a request's KV has arrived computes the prompt's last token. vllm-ascend's attention treats
    # that as a prefill. The graph is chosen by the number of tokens alone, so it is that of a decode step. With
    # speculative decoding, decode steps have more tokens. With the recompute scheduler, it treats it as a decode step.
    first_is_decode = vllm_config.speculative_config is not None or _plans_without_prompts(vllm_config)
    full = graphs is not None and graphs.has_full_cudagraphs()
    if parallel.decode_context_parallel_size > 1 and full and not first_is_decode:
        yield (
            f"cudagraph_mode is {graphs.name} on a decode engine with decode context parallelism: a request's first "
            "step would be replayed from a graph that does not see its KV. Set it to PIECEWISE or NONE "
            "(--compilation-config), or recompute_scheduler_enable in additional_config"
        )


def _returns_routed_experts(vllm_config: "VllmConfig") -> bool:
    """Whether the setting is on. vLLM 0.23 has it in the model's configuration, 0.32 in a configuration of its own."""
    places = (getattr(vllm_config, "aux_output_config", None), vllm_config.model_config)
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def unsupported_weights(vllm_config: "VllmConfig") -> str | None:
    """Returns why a decode engine's loaded model is refused; None if it is not.

    A decode engine computes prompts, too, unless `who_computes` is never. vllm-ascend's MLAPO drops the weights that
    MLA needs for that, if it expects that the engine computes none. Sparse attention, which has an indexer, does not
    need these weights.
    """
    if not computes_prompts(vllm_config):
        return None
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        attention = getattr(layer, "impl", None)
        projection = getattr(attention, "fused_qkv_a_proj", None)
        if projection is not None and projection.weight is None and not hasattr(attention, "indexer"):
            return (
                f"{name} has no weights to compute prompts with: set who_computes to never, or "
                "--max-num-batched-tokens above 1024 (vllm-ascend keeps them then), or enable_mlapo to false in "
                "additional_config"
            )
    return None


NO_PROMPTS_WITH_INT8 = (
    "a decode engine that keeps KV in int8 (C8, FAKQuant) cannot compute prompts: set who_computes to never, or "
    "recompute_scheduler_enable in additional_config"
)
"""Why such a decode engine is refused if `computes_prompts`. vllm-ascend's prefill of MLA takes the latent as 16 bits.
On such an engine, its attention for C8 computes nothing in a step that has more than decodes."""
