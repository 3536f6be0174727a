# SPDX-License-Identifier: Apache-2.0
"""Whether the connector would refuse an engine, as far as its command and the model's files tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.connector.unsupported import (
    NO_PROMPTS_WITH_INT8,
    computes_prompts,
    unsupported,
    unsupported_weights,
)
from vllm_ascend_pd.tools.migrate.command import EngineArguments
from vllm_ascend_pd.tools.plan.layers import ModelShape
from vllm_ascend_pd.tools.plan.model import CacheDtype, PlanError, UnsaidError, read_model

# The model that an engine serves: its `config.json`, and how its caches are quantized.

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFacts:
    shape: ModelShape | None  # None if it cannot be described
    problem: str | None = None  # why not
    unsaid: bool = False  # whether that is only because a field is not known, so that the engine may well start
    experts: bool = True  # whether it has experts (MoE)

    @property
    def compressed(self) -> bool:
        """Whether its caches have one entry for several tokens."""
        return self.shape is not None and self.shape.is_compressed

    @property
    def int8_caches(self) -> bool:
        """Whether decode keeps caches in int8, and prefill does not."""
        return self.shape is not None and self.shape.is_packed


def read_facts(path: str, kv_cache_dtype: str | None) -> ModelFacts:
    """`path`: a folder with config.json, or that file. `kv_cache_dtype`: of the engine."""
    given = Path(path)
    shape, problem, unsaid = None, None, False
    try:
        shape = _read_shape(given, _dtype(kv_cache_dtype))
    except OSError:
        return ModelFacts(None, f"there is no config.json at {path!r} on this host: give --model FOLDER")
    except PlanError as error:
        problem, unsaid = str(error), isinstance(error, UnsaidError)
    try:
        config = json.loads((given / "config.json" if given.is_dir() else given).read_text(encoding="utf-8"))
    except ValueError:
        return ModelFacts(None, problem, unsaid)
    if not isinstance(config, dict):  # `problem` says so
        return ModelFacts(None, problem, unsaid)
    text = config.get("text_config") or config
    experts = isinstance(text, dict) and any(isinstance(text.get(field), int) and text[field] > 1 for field in _EXPERTS)
    return ModelFacts(shape, problem, unsaid, experts)


def _read_shape(path: Path, dtype: CacheDtype) -> ModelShape:
    """Raises PlanError or OSError.

    In 8 bits, sparse attention of vllm-ascend 0.30 packs latent, rope and scales in one tensor, which is sent as it is.
    """
    if dtype in (CacheDtype.FP8, CacheDtype.INT8):
        shape = read_model(path, CacheDtype.AUTO)
        if shape.is_sparse:
            return shape
    return read_model(path, dtype)


def _dtype(name: str | None) -> CacheDtype:
    if name is None:
        return CacheDtype.AUTO
    if name.startswith("fp8"):
        return CacheDtype.FP8
    try:
        return CacheDtype(name)
    except ValueError:
        raise PlanError(f"--kv-cache-dtype {name}: not known to this command") from None


# Whether the connector would refuse an engine: its own checks run, on objects that have what they read of vLLM's
# configuration.

MLAPO_TOKENS = 1024
"""vllm-ascend's MLAPO_MAX_SUPPORTED_TOKENS (`attention/mla_v1.py`)."""


class _Graphs:
    """Stands for vLLM's CUDAGraphMode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def has_full_cudagraphs(self) -> bool:
        return self.name.startswith("FULL")


def refusal(arguments: EngineArguments, ours: Mapping[str, Any], served: ModelFacts) -> str | None:
    """Returns why an engine with these arguments would be refused; None if it would not be.

    ours: this connector's entry of `--kv-transfer-config`.
    """
    config, model = _vllm_config(arguments, ours), served.shape
    decodes = ours.get("kv_role") == "kv_consumer"
    if (reason := unsupported(config)) is not None:
        return reason
    if decodes and served.int8_caches and computes_prompts(config):
        return NO_PROMPTS_WITH_INT8
    if decodes and model is not None and _drops_prefill_weights(arguments, model):
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
    dense_mla = model.mla and not model.is_sparse and not model.is_compressed
    return bool(mlapo) and dense_mla and arguments.text("quantization") == "ascend" and tokens <= MLAPO_TOKENS


def _vllm_config(arguments: EngineArguments, ours: Mapping[str, Any]) -> SimpleNamespace:
    graphs = "NONE" if arguments.switch("enforce-eager") else "PIECEWISE"
    graphs = str(arguments.json("compilation-config").get("cudagraph_mode") or graphs).upper()
    consumer = ours.get("kv_role") == "kv_consumer"
    return SimpleNamespace(
        additional_config=arguments.json("additional-config"),
        model_config=SimpleNamespace(
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
