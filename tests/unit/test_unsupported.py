# SPDX-License-Identifier: Apache-2.0
"""Settings that are refused when an engine starts, with vLLM's own configuration."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode

import vllm_ascend_pd
from vllm_ascend_pd.connector.model import computes_prompts, unsupported, unsupported_weights
from vllm_ascend_pd.connector.setup import read_setup

CONSUMER, PRODUCER = "kv_consumer", "kv_producer"


def configured(role: str, **changes: Any) -> VllmConfig:
    vllm_ascend_pd.register()
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="LayerwisePushConnector", kv_role=role))
    config.compilation_config.cudagraph_mode = changes.pop("graphs", CUDAGraphMode.NONE)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("role", [CONSUMER, PRODUCER])
def test_nothing_is_refused_of_defaults(role: str) -> None:
    assert unsupported(configured(role)) is None
    assert unsupported(configured(role, graphs=CUDAGraphMode.FULL_AND_PIECEWISE)) is None


NZ = {"enable_kv_nz": True}
RECOMPUTE = {"recompute_scheduler_enable": True}
HAMMING = {"hamming_sparse": {"enabled": True, "sparse_json_location": "/x.json"}}


@pytest.mark.parametrize(
    ("role", "additional", "named"),
    [
        (CONSUMER, NZ, "enable_kv_nz"),
        (PRODUCER, NZ, "enable_kv_nz"),
        (CONSUMER, RECOMPUTE, None),
        (PRODUCER, RECOMPUTE, None),
        (CONSUMER, HAMMING, "hamming_sparse"),
        (PRODUCER, HAMMING, None),
        (CONSUMER, {"hamming_sparse": {"enabled": False}}, None),
    ],
)
def test_settings_of_vllm_ascend(role: str, additional: dict[str, Any], named: str | None) -> None:
    reason = unsupported(configured(role, additional_config=additional))
    assert (reason is None) == (named is None)
    assert reason is None or named is None or f"additional_config has {named}" in reason


@pytest.mark.parametrize(
    ("additional", "said", "refused", "computes"),
    [
        ({}, None, False, True),
        ({}, "auto", False, True),
        ({}, "never", False, False),
        (RECOMPUTE, None, False, False),
        (RECOMPUTE, "never", False, False),
        (RECOMPUTE, "auto", True, True),
        (RECOMPUTE, "prefill", True, True),
    ],
)
def test_who_computes_beside_the_recompute_scheduler(
    additional: dict[str, Any], said: str | None, refused: bool, computes: bool
) -> None:
    config = configured(CONSUMER, additional_config=additional)
    config.kv_transfer_config.kv_connector_extra_config = {} if said is None else {"who_computes": said}
    reason = unsupported(config)
    assert (reason is not None) == refused
    assert reason is None or f"who_computes is {said}" in reason
    assert computes_prompts(config) == computes
    if not refused:
        assert (read_setup(config, None).config.who_computes == "never") == (not computes)


@pytest.mark.parametrize("role", [CONSUMER, PRODUCER])
@pytest.mark.parametrize(
    ("dtype", "calculates", "refused"),
    [
        ("fp8_e4m3", True, True),
        ("fp8", True, True),
        ("fp8", False, False),
        ("auto", True, False),
        ("bfloat16", True, False),
    ],
)
def test_scales_of_the_kv_cache_that_each_engine_calculates(
    role: str, dtype: str, calculates: bool, refused: bool
) -> None:
    cache = SimpleNamespace(cache_dtype=dtype, calculate_kv_scales=calculates)
    reason = unsupported(configured(role, cache_config=cache))
    assert (reason is not None) == refused
    assert reason is None or f"--calculate-kv-scales is set with --kv-cache-dtype {dtype}" in reason


@pytest.mark.parametrize("role", [CONSUMER, PRODUCER])
@pytest.mark.parametrize("sleeps", [True, False])
def test_engines_that_may_sleep(role: str, sleeps: bool) -> None:
    reason = unsupported(configured(role, model_config=SimpleNamespace(enable_sleep_mode=sleeps)))
    assert (reason is not None) == sleeps
    assert reason is None or "--enable-sleep-mode" in reason


@pytest.mark.parametrize(("role", "refused"), [(CONSUMER, True), (PRODUCER, False)])
@pytest.mark.parametrize("asked", [True, False])
def test_routed_experts_of_prompts_that_decode_does_not_compute(role: str, refused: bool, asked: bool) -> None:
    """With vLLM's own setting, which is another one in each version."""
    config = configured(role)
    if hasattr(config, "aux_output_config"):
        config.aux_output_config.enable_return_routed_experts = asked
    else:
        assert "enable_return_routed_experts" in ModelConfig.__dataclass_fields__
        config.model_config = SimpleNamespace(enable_return_routed_experts=asked, enable_sleep_mode=False)
    reason = unsupported(config)
    assert (reason is not None) == (refused and asked)
    assert reason is None or "--enable-return-routed-experts" in reason


@pytest.mark.parametrize(("role", "refused"), [(CONSUMER, True), (PRODUCER, False)])
def test_prefill_context_parallelism_on_decode(role: str, refused: bool) -> None:
    parallel = ParallelConfig(prefill_context_parallel_size=2)
    reason = unsupported(configured(role, parallel_config=parallel))
    assert (reason is not None) == refused
    assert reason is None or "prefill_context_parallel_size is 2 on a decode engine" in reason


@pytest.mark.parametrize(
    ("role", "dcp", "graphs", "drafts", "refused"),
    [
        (CONSUMER, 2, "FULL_DECODE_ONLY", False, True),
        (CONSUMER, 2, "FULL_AND_PIECEWISE", False, True),
        (CONSUMER, 2, "FULL", False, True),
        (CONSUMER, 2, "FULL_DECODE_ONLY", True, False),
        (CONSUMER, 2, "PIECEWISE", False, False),
        (CONSUMER, 2, "NONE", False, False),
        (CONSUMER, 1, "FULL_DECODE_ONLY", False, False),
        (PRODUCER, 2, "FULL_DECODE_ONLY", False, False),
    ],
)
def test_graphs_with_decode_context_parallelism(role: str, dcp: int, graphs: str, drafts: bool, refused: bool) -> None:
    parallel = ParallelConfig(tensor_parallel_size=dcp, decode_context_parallel_size=dcp)
    speculative = SimpleNamespace() if drafts else None
    mode = CUDAGraphMode[graphs]
    reason = unsupported(configured(role, parallel_config=parallel, graphs=mode, speculative_config=speculative))
    assert (reason is not None) == refused
    assert reason is None or f"cudagraph_mode is {graphs}" in reason


@pytest.mark.parametrize(
    ("attention", "refused"),
    [
        ({"fused_qkv_a_proj": SimpleNamespace(weight=None)}, True),
        ({"fused_qkv_a_proj": SimpleNamespace(weight=object())}, False),
        ({"fused_qkv_a_proj": SimpleNamespace(weight=None), "indexer": object()}, False),
        ({"fused_qkv_a_proj": None}, False),
        ({}, False),
    ],
)
def test_weights_that_were_dropped(attention: dict[str, Any], refused: bool) -> None:
    config = configured(CONSUMER)
    layers = {
        "model.layers.0.attn": object(),
        "model.layers.1.attn": SimpleNamespace(impl=SimpleNamespace(**attention)),
    }
    config.compilation_config.static_forward_context = layers
    reason = unsupported_weights(config)
    assert (reason is not None) == refused
    assert reason is None or reason.startswith("model.layers.1.attn has no weights to compute prompts with")


def test_dropped_weights_are_fine_if_decode_computes_no_prompts() -> None:
    config = configured(CONSUMER)
    dropped = SimpleNamespace(impl=SimpleNamespace(fused_qkv_a_proj=SimpleNamespace(weight=None)))
    config.compilation_config.static_forward_context = {"model.layers.0.attn": dropped}
    config.kv_transfer_config.kv_connector_extra_config = {"who_computes": "never"}
    assert unsupported_weights(config) is None


def test_full_graphs_with_context_parallelism_need_the_recompute_scheduler() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    graphs = CUDAGraphMode.FULL_DECODE_ONLY
    assert unsupported(configured(CONSUMER, parallel_config=parallel, graphs=graphs)) is not None
    config = configured(CONSUMER, parallel_config=parallel, graphs=graphs, additional_config=RECOMPUTE)
    assert unsupported(config) is None
