# SPDX-License-Identifier: Apache-2.0
"""The connector inside vLLM's own configuration and factory, without an engine."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec, UniformTypeKVCacheSpecs

import vllm_ascend_pd
from harness.connectors import NAME, caches_of, config_of, full_attention, scheduler_connector
from harness.ports import reserve_port
from vllm_ascend_pd.connector.caches import gives_blocks_away, layer_specs
from vllm_ascend_pd.connector.setup import own_host
from vllm_ascend_pd.connector.vllm_requests import external_request_id
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.observe.stats import PREFILL_FIRST_TOKENS
from vllm_ascend_pd.transport.wakeup import BETWEEN_S, WakeupSocket


@pytest.fixture(scope="module")
def connector_class() -> type[KVConnectorBase_V1]:
    """The connector as vLLM finds it: by name, after the plugin has registered it twice, as vLLM may do."""
    vllm_ascend_pd.register()
    vllm_ascend_pd.register()
    return KVConnectorFactory.get_connector_class_by_name(NAME)


def test_it_is_a_whole_connector(connector_class: type[KVConnectorBase_V1]) -> None:
    assert issubclass(connector_class, SupportsHMA)
    assert not getattr(connector_class, "__abstractmethods__", None)
    assert not connector_class.requires_piecewise_for_cudagraph({}), "decode would lose its full graphs"


class _Config:
    """The part of a VllmConfig that is read before the transfer config is refused."""

    def __init__(self, role: str, extra: dict[str, Any]) -> None:
        self.kv_transfer_config = KVTransferConfig(kv_connector=NAME, kv_role=role, kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("role", "extra", "named"),
    [
        ("kv_both", {}, "kv_both"),
        ("kv_producer", {"lease": 3}, "did you mean `lease_s`"),
    ],
    ids=["both", "unknown-key"],
)
def test_a_config_it_cannot_work_with(
    connector_class: type[KVConnectorBase_V1], role: str, extra: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        connector_class(_Config(role, extra), KVConnectorRole.WORKER, None)


def test_a_host_that_does_not_know_its_address(
    connector_class: type[KVConnectorBase_V1], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then returns 0.0.0.0. Tickets would name it, and listeners would listen everywhere."""
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: "0.0.0.0")
    with pytest.raises(ConfigError, match="set VLLM_HOST_IP"):
        own_host()
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    assert own_host() == "0.0.0.0"


@pytest.mark.parametrize(
    ("engine_id", "api_id"),
    [
        ("cmpl-7c5a-0-0a1b2c3d", "cmpl-7c5a-0"),
        ("1_cmpl-7c5a-0-0a1b2c3d", "cmpl-7c5a-0"),
        ("chatcmpl-7c5a-0a1b2c3d", "chatcmpl-7c5a"),
        ("7_of-mine-0a1b2c3d", "7_of-mine"),
        ("no-suffix", "no-suffix"),
    ],
)
def test_the_id_a_proxy_knows_a_request_by(engine_id: str, api_id: str) -> None:
    assert external_request_id(engine_id) == api_id


@pytest.mark.parametrize(
    ("cache_dtype", "stored", "said"),
    [
        ("auto", torch.bfloat16, "bfloat16"),
        ("fp8", torch.uint8, "float8_e4m3fn"),
        ("fp8_e4m3", torch.uint8, "float8_e4m3fn"),
        ("fp8_e5m2", torch.uint8, "float8_e5m2"),
        ("fp8_e5m2", torch.bfloat16, "bfloat16"),  # a layer left out of quantization
        ("fp8_ds_mla", torch.uint8, "fp8_ds_mla"),
        ("auto", torch.int8, "int8"),
    ],
)
def test_what_a_cache_holds_is_told_apart(model: Path, cache_dtype: Any, stored: torch.dtype, said: str) -> None:
    """Equal sizes do not show what bytes mean: decode would read other numbers than prefill wrote."""
    config = config_of(model, {"kv_role": "kv_consumer"}, dtype="bfloat16", kv_cache_dtype=cache_dtype)
    caches = {"layer.0": torch.zeros((8, 4, 16, 64), dtype=stored)}
    specs = layer_specs(caches_of(full_attention(dtype=stored)), config)
    [geometry] = describe(caches, specs, heads_first=True).description.geometries
    assert geometry.dtype == said


EMPTY = SchedulerOutput.make_empty()
COMPUTING = dataclasses.replace(EMPTY, num_scheduled_tokens={"other": 1}, total_num_scheduled_tokens=1)


@pytest.mark.parametrize(
    ("policy", "window", "refused"), [("recompute", 64, True), ("recompute", 0, False), ("fail", 64, False)]
)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "MultiConnector"])
def test_recomputing_a_request_that_needs_more_blocks_than_its_transfer_is_refused(
    model: Path, policy: str, window: int, refused: bool, nested: bool
) -> None:
    """vLLM would schedule it before requests that have their blocks and could run."""
    of_a_block = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    spec = SlidingWindowSpec(**of_a_block, sliding_window=window) if window else full_attention()
    transfer: dict[str, Any] = {"kv_role": "kv_consumer", "kv_port": reserve_port()}
    if nested:  # vLLM goes by its policy, and not by what is said or left out further in
        one = {"kv_connector": NAME, **transfer}
        transfer |= {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [one]}}
    config = config_of(model, {**transfer, "kv_load_failure_policy": policy})
    with (
        pytest.raises(ConfigError, match="Set it to fail") if refused else nullcontext(),
        scheduler_connector(config, caches_of(spec)),
    ):
        pass


def test_windows_in_blocks_of_full_attention_free_no_blocks_early() -> None:
    """vLLM keeps all groups alike below a MultiConnector with members that support only one group."""
    assert not gives_blocks_away(caches_of(full_attention(sliding_window=64)))
    of_layers = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": full_attention()})
    assert not gives_blocks_away(caches_of(of_layers))


def decode(model: Path, **options: Any) -> VllmConfig:
    return config_of(model, {"kv_role": "kv_consumer", "kv_port": reserve_port()}, **options)


@pytest.mark.parametrize(("stages", "asynchronous", "in_flight"), [(1, False, 1), (1, True, 2), (2, False, 2)])
def test_only_one_step_in_flight_waits_and_none_behind_a_step_that_computes(
    model: Path, stages: int, asynchronous: bool, in_flight: int
) -> None:
    """Otherwise a pipeline's first stage would delay the next token."""
    config = decode(model, pipeline_parallel_size=stages)
    config.scheduler_config.async_scheduling = asynchronous  # vLLM's CPU backend always turns it off
    with scheduler_connector(config) as connector:
        waits = [connector.build_connector_meta(output).step.wait_s for output in (COMPUTING, *[EMPTY] * 4)]
    assert [wait > 0 for wait in waits] == [step > 0 and step % in_flight == 0 for step in range(5)]


@pytest.mark.parametrize(
    ("backend", "first", "pauses"),
    [(None, None, [BETWEEN_S]), ("uni", None, []), (None, "auto", [BETWEEN_S]), ("uni", "auto", [0.0])],
)
def test_the_scheduler_pauses_if_ranks_have_their_own_processes(
    model: Path, monkeypatch: pytest.MonkeyPatch, backend: str | None, first: str | None, pauses: list[float]
) -> None:
    """That holds for a single rank, too, as vLLM's CPU backend has it. Otherwise it would poll the rank while a step
    waits. Where prompts may be computed first (`prefill_first_tokens`), any scheduler can be woken: ranks do not hear
    of these.
    """
    config = decode(model)
    config.kv_transfer_config.kv_connector_extra_config["prefill_first_tokens"] = first
    if backend is not None:
        config.parallel_config.distributed_executor_backend = backend
    slept: list[float] = []
    monkeypatch.setattr(WakeupSocket, "wait", lambda self, timeout_s: slept.append(timeout_s))
    with scheduler_connector(config) as connector:
        step = connector.build_connector_meta(EMPTY).step
        assert step.wait_s > 0
        assert bool(step.wakeup_address) == bool(pauses)  # without, it never does
        slept.clear()
        connector.build_connector_meta(EMPTY)
        assert slept == pauses


@pytest.mark.parametrize(
    ("specs", "blocks", "tokens"),
    [
        ([full_attention()], 2 * 32 + 1, 256),  # of 32 blocks for the longest prompt, and one that vLLM keeps
        ([full_attention()], 2 * 32, 0),
        ([full_attention(), "window"], 1000, 0),
    ],
)
def test_prefill_tells_which_prompts_may_be_computed_before_decode_gives_them_memory(
    model: Path, specs: list[Any], blocks: int, tokens: int
) -> None:
    """None, if it might have to free one before its ticket comes, or to refuse the ticket. It is told once."""
    window = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=32, dtype=torch.float32, sliding_window=64)
    config = config_of(model, {"kv_role": "kv_producer", "kv_port": reserve_port()}, max_num_batched_tokens=256)
    caches = caches_of(*(window if spec == "window" else spec for spec in specs), blocks=blocks)
    with scheduler_connector(config, caches) as connector:
        stats = connector.get_kv_connector_stats()
        told = 0 if stats is None else stats.data["gauges"][PREFILL_FIRST_TOKENS.name][""]
        assert told == tokens
        assert connector.get_kv_connector_stats() is None
