# SPDX-License-Identifier: Apache-2.0
"""Asks the connector whether it would refuse an engine, from the engine's arguments alone.

The connector's own checks run, on objects that have what these checks read of vLLM's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.connector.model import unsupported, unsupported_weights
from vllm_ascend_pd.tools.migrate.arguments import EngineArguments
from vllm_ascend_pd.tools.plan.model import ModelShape

MLAPO_TOKENS = 1024
"""vllm-ascend's MLAPO_MAX_SUPPORTED_TOKENS (`attention/mla_v1.py`)."""


class _Graphs:
    """Stands for vLLM's CUDAGraphMode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def has_full_cudagraphs(self) -> bool:
        return self.name.startswith("FULL")


def refusal(arguments: EngineArguments, ours: Mapping[str, Any], model: ModelShape | None) -> str | None:
    """Returns why an engine with these arguments would be refused; None if it would not be.

    ours: this connector's entry of `--kv-transfer-config`.
    model: the model's shape, None if unknown.
    """
    config = _vllm_config(arguments, ours)
    if (reason := unsupported(config)) is not None:
        return reason
    if ours.get("kv_role") == "kv_consumer" and model is not None and _drops_prefill_weights(arguments, model):
        dropped = SimpleNamespace(impl=SimpleNamespace(fused_qkv_a_proj=SimpleNamespace(weight=None)))
        config.compilation_config.static_forward_context = {"attention (W8A8)": dropped}
        return unsupported_weights(config)
    return None


def _drops_prefill_weights(arguments: EngineArguments, model: ModelShape) -> bool:
    """Whether vllm-ascend's MLAPO may drop the weights that MLA needs for prompts, on a decode engine.

    It does so for layers in W8A8, which only the checkpoint's files tell.
    """
    mlapo = arguments.json("additional-config").get("enable_mlapo")
    if mlapo is None:
        mlapo = arguments.environment.get("VLLM_ASCEND_ENABLE_MLAPO", "1") != "0"
    tokens = arguments.number("max-num-batched-tokens", MLAPO_TOKENS + 1)
    dense_mla = model.mla and len(model.widths) == 2
    return bool(mlapo) and dense_mla and arguments.text("quantization") == "ascend" and tokens <= MLAPO_TOKENS


def _vllm_config(arguments: EngineArguments, ours: Mapping[str, Any]) -> SimpleNamespace:
    graphs = "NONE" if arguments.switch("enforce-eager") else "PIECEWISE"
    graphs = str(arguments.json("compilation-config").get("cudagraph_mode") or graphs).upper()
    consumer = ours.get("kv_role") == "kv_consumer"
    return SimpleNamespace(
        additional_config=arguments.json("additional-config"),
        model_config=SimpleNamespace(
            enable_sleep_mode=bool(arguments.switch("enable-sleep-mode")),
            enable_return_routed_experts=bool(arguments.switch("enable-return-routed-experts")),
            enforce_eager=bool(arguments.switch("enforce-eager")),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=arguments.text("kv-cache-dtype") or "auto",
            calculate_kv_scales=bool(arguments.switch("calculate-kv-scales")),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=arguments.number("tensor-parallel-size", 1),
            data_parallel_size=arguments.number("data-parallel-size", 1),
            prefill_context_parallel_size=arguments.number("prefill-context-parallel-size", 1),
            decode_context_parallel_size=arguments.number("decode-context-parallel-size", 1),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=arguments.number("max-num-batched-tokens", 2048)),
        compilation_config=SimpleNamespace(cudagraph_mode=_Graphs(graphs), static_forward_context={}),
        speculative_config=arguments.speculation or None,
        kv_transfer_config=SimpleNamespace(
            kv_role=ours.get("kv_role"),
            is_kv_consumer=consumer,
            is_kv_producer=not consumer,
            kv_connector_extra_config=ours.get("kv_connector_extra_config") or {},
        ),
    )
