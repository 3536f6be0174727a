# SPDX-License-Identifier: Apache-2.0
"""Settings that are refused when an engine starts, with vLLM's own configuration."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode

import vllm_ascend_pd
from vllm_ascend_pd.connector.patches import vllm_0_33_lost_steps
from vllm_ascend_pd.connector.setup import read_setup
from vllm_ascend_pd.connector.unsupported import computes_prompts, unsupported, unsupported_weights

CONSUMER, PRODUCER = "kv_consumer", "kv_producer"


def configured(role: str, **changes: Any) -> VllmConfig:
    vllm_ascend_pd.register()
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="LayerwisePushConnector", kv_role=role))
    config.compilation_config.cudagraph_mode = changes.pop("graphs", CUDAGraphMode.NONE)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


RECOMPUTE = {"recompute_scheduler_enable": True}


def of_vllm_ascend(**settings: Any) -> dict[str, Any]:
    return {"additional_config": settings}


def cache(dtype: str, calculates: bool) -> dict[str, Any]:
    return {"cache_config": SimpleNamespace(cache_dtype=dtype, calculate_kv_scales=calculates)}


def fault_tolerant(enabled: bool) -> dict[str, Any]:
    parallel = ParallelConfig()
    parallel.enable_fault_tolerance = enabled
    return {"parallel_config": parallel}


def sharing(graphs: str, dcp: int = 2, **more: Any) -> dict[str, Any]:
    """With decode context parallelism."""
    parallel = ParallelConfig(tensor_parallel_size=dcp, decode_context_parallel_size=dcp)
    return {"parallel_config": parallel, "graphs": CUDAGraphMode[graphs], **more}


BOTH, DECODE, NONE = (CONSUMER, PRODUCER), (CONSUMER,), ()


@pytest.mark.parametrize(
    ("changes", "refusing", "named"),
    [
        ({}, NONE, ""),
        ({"graphs": CUDAGraphMode.FULL_AND_PIECEWISE}, NONE, ""),
        (of_vllm_ascend(enable_kv_nz=True), BOTH, "additional_config has enable_kv_nz"),
        (of_vllm_ascend(**RECOMPUTE), NONE, ""),
        (of_vllm_ascend(hamming_sparse={"enabled": True, "sparse_json_location": "/x"}), DECODE, "has hamming_sparse"),
        (of_vllm_ascend(hamming_sparse={"enabled": False}), NONE, ""),
        (cache("fp8_e4m3", True), BOTH, "--calculate-kv-scales is set with --kv-cache-dtype fp8_e4m3"),
        (cache("fp8", True), BOTH, "--calculate-kv-scales is set with --kv-cache-dtype fp8"),
        (cache("fp8", False), NONE, ""),
        (cache("auto", True), NONE, ""),
        (cache("bfloat16", True), NONE, ""),
        (fault_tolerant(True), NONE if vllm_0_33_lost_steps.fits() else BOTH, "--enable-fault-tolerance is set"),
        (fault_tolerant(False), NONE, ""),
        (
            {"parallel_config": ParallelConfig(prefill_context_parallel_size=2)},
            DECODE,
            "prefill_context_parallel_size is 2 on a decode engine",
        ),
        (sharing("FULL_DECODE_ONLY"), DECODE, "cudagraph_mode is FULL_DECODE_ONLY"),
        (sharing("FULL_AND_PIECEWISE"), DECODE, "cudagraph_mode is FULL_AND_PIECEWISE"),
        (sharing("FULL"), DECODE, "cudagraph_mode is FULL"),
        (sharing("FULL_DECODE_ONLY", speculative_config=SimpleNamespace()), NONE, ""),
        (sharing("FULL_DECODE_ONLY", additional_config=RECOMPUTE), NONE, ""),
        (sharing("PIECEWISE"), NONE, ""),
        (sharing("NONE"), NONE, ""),
        (sharing("FULL_DECODE_ONLY", dcp=1), NONE, ""),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], refusing: tuple[str, ...], named: str) -> None:
    reasons = {role: unsupported(configured(role, **changes)) for role in BOTH}
    assert tuple(role for role, reason in reasons.items() if reason is not None) == refusing
    assert all(named in reason for reason in reasons.values() if reason is not None)


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
        ({"scheduler_config": RECOMPUTE}, None, False, False),  # as vllm-ascend 0.30 has it
        ({"scheduler_config": RECOMPUTE}, "auto", True, True),
        ({"scheduler_config": {"recompute_scheduler_enable": False}, **RECOMPUTE}, None, False, True),
    ],
)
def test_who_computes_beside_the_recompute_scheduler(
    additional: dict[str, Any], said: str | None, refused: bool, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    config = configured(CONSUMER, additional_config=additional)
    config.kv_transfer_config.kv_connector_extra_config = {} if said is None else {"who_computes": said}
    reason = unsupported(config)
    assert (reason is not None) == refused
    assert reason is None or f"who_computes is {said}" in reason
    assert computes_prompts(config) == computes
    if not refused:
        assert (read_setup(config, None).config.who_computes == "never") == (not computes)


@pytest.mark.parametrize(("role", "refused"), [(CONSUMER, True), (PRODUCER, False)])
@pytest.mark.parametrize("asked", [True, False])
def test_routed_experts_of_prompts_that_decode_does_not_compute(role: str, refused: bool, asked: bool) -> None:
    """With vLLM's own setting, which is another one in each version."""
    config = configured(role)
    if hasattr(config, "aux_output_config"):
        config.aux_output_config.enable_return_routed_experts = asked
    else:
        assert "enable_return_routed_experts" in ModelConfig.__dataclass_fields__
        config.model_config = SimpleNamespace(enable_return_routed_experts=asked)
    reason = unsupported(config)
    assert (reason is not None) == (refused and asked)
    assert reason is None or "--enable-return-routed-experts" in reason


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
