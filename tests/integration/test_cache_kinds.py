# SPDX-License-Identifier: Apache-2.0
"""Kinds of caches, with vLLM's own classes: supported ones are accepted by name, and every other one is refused."""

import dataclasses
import inspect
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.kv_cache_interface as interface
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from harness.connectors import caches_of
from vllm_ascend_pd.connector import caches as caches_module
from vllm_ascend_pd.connector import vllm_view
from vllm_ascend_pd.connector.build import _check_buffers
from vllm_ascend_pd.connector.caches import check_kinds
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import LayerSpec, LayoutError

UNDERSTOOD = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
}
ABSTRACT = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
VALUES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
    "sliding_window": 64,
    "attention_chunk_size": 64,
    "shapes": ((3, 8),),
    "dtypes": (torch.float32,),
    "rswa_window": 64,
    "page_size": 4096,
    "blocks_per_request": 2,
}
KINDS = {
    name: kind
    for name, kind in vars(interface).items()
    if inspect.isclass(kind) and issubclass(kind, KVCacheSpec) and name not in ABSTRACT
}


HAS = {field.name for kind in KINDS.values() for field in dataclasses.fields(kind)}


def made(kind: type, **changes: Any) -> Any:
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    return kind(**{name: VALUES[name] for name in required} | changes)


def caches(*specs: Any, **of_the_last: Any) -> KVCacheConfig:
    found = caches_of(*specs)
    for name, value in of_the_last.items():
        setattr(found.kv_cache_groups[-1], name, value)
    return found


def uniform(*specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={f"inner.{i}": spec for i, spec in enumerate(specs)})


def wrapped(spec: Any) -> UniformTypeKVCacheSpecs:
    members = {"layer.0": made(FullAttentionSpec), "layer.inner": spec}
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=members)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_cache_of_this_vllm_is_understood_or_refused_by_name(kind: str) -> None:
    spec = made(KINDS[kind])
    for layer, config in (("layer.1", caches(made(FullAttentionSpec), spec)), ("layer.inner", caches(wrapped(spec)))):
        if kind in UNDERSTOOD:
            check_kinds(config)
            assert len(caches_module.cache_groups(config)) == len(config.kv_cache_groups)
            continue
        with pytest.raises(LayoutError, match=rf"{layer}: caches of kind {kind} are not supported: serve this model"):
            caches_module.cache_groups(config)
        with pytest.raises(LayoutError, match=rf"{layer}: caches of kind {kind} are not supported"):
            caches_module.layer_specs(config, None)


def test_this_vllm_has_all_kinds_that_are_understood() -> None:
    assert set(KINDS) >= UNDERSTOOD


def test_a_kind_derived_elsewhere_is_another_kind() -> None:
    derived = type("FullAttentionSpec", (FullAttentionSpec,), {"__module__": "plugin"})
    with pytest.raises(LayoutError, match=r"caches of kind plugin\.FullAttentionSpec are not supported"):
        caches_module.cache_groups(caches(made(derived)))


@pytest.mark.parametrize("kind", [FullAttentionSpec, MLAAttentionSpec])
@pytest.mark.parametrize("field", ["compress_ratio", "tokens_per_state"])
@pytest.mark.parametrize("ratio", [4, 128, Fraction(1, 4)])
def test_an_entry_of_several_tokens_is_refused_in_other_models(kind: type, field: str, ratio: Any) -> None:
    spec = made(kind)
    object.__setattr__(spec, field, ratio)
    for config in (caches(spec), caches(wrapped(spec))):
        with pytest.raises(LayoutError, match=rf"an entry for {ratio} tokens of models other than DeepSeek V4"):
            caches_module.cache_groups(config)


RATIO = "tokens_per_state" if "tokens_per_state" in HAS else "compress_ratio"


def test_compressed_caches_of_deepseek_v4_are_understood() -> None:
    of_v4 = made(MLAAttentionSpec, model_version="deepseek_v4", **{RATIO: 4})
    index = made(MLAAttentionSpec, **{RATIO: 4})
    for others in ((), (made(MLAAttentionSpec, **{RATIO: 8}),)):  # with vLLM, one group has entries of several lengths
        [group] = caches_module.cache_groups(caches(uniform(of_v4, index, *others)))
        assert (group.span, group.tokens_per_entry) == (16, 4)
    for refused, reason in {
        made(MLAAttentionSpec, **{RATIO: 128}): "with an entry for 128 tokens in blocks of 16",
        made(interface.SlidingWindowMLASpec, **{RATIO: 4}): "caches of kind SlidingWindowMLASpec with an entry for 4",
        made(
            MLAAttentionSpec, block_size=32, **{RATIO: 4}
        ): "a cache group whose layers differ in the tokens of a block",
    }.items():
        with pytest.raises(LayoutError, match=reason):
            caches_module.cache_groups(caches(uniform(of_v4, refused)))
    for sparse in (Fraction(1, 4), 0) if RATIO == "tokens_per_state" else ():
        with pytest.raises(LayoutError, match=rf"several entries for one token \({sparse} tokens for an entry\)"):
            caches_module.cache_groups(caches(uniform(of_v4, made(MLAAttentionSpec, **{RATIO: sparse}))))
    with pytest.raises(LayoutError, match="with context parallelism caches of kind"):
        caches_module.cache_groups(caches(of_v4), shares=2)


def test_a_field_that_is_not_known_must_have_its_default() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(FullAttentionSpec):
        tokens_apart: int = 1

    Later.__module__, Later.__qualname__ = FullAttentionSpec.__module__, "FullAttentionSpec"
    caches_module.cache_groups(caches(made(Later)))
    with pytest.raises(LayoutError, match="caches of kind FullAttentionSpec with tokens_apart 2 are not supported"):
        caches_module.cache_groups(caches(made(Later, tokens_apart=2)))


@pytest.mark.parametrize("field", ["cache_sparse_sfa_turboquant", "store_on_host", "indexes_kv_by_block_stride"])
def test_what_vllm_ascend_0_30_adds_to_its_main_cache_is_refused_if_it_is_used(field: str) -> None:
    fields = [(field, bool, dataclasses.field(default=False))]
    kind = dataclasses.make_dataclass("AscendMLAAttentionSpec", fields, bases=(MLAAttentionSpec,), frozen=True)
    kind.__module__ = "vllm_ascend.core.kv_cache_interface"
    caches_module.cache_groups(caches(made(kind)))
    with pytest.raises(LayoutError, match=f"caches of kind AscendMLAAttentionSpec with {field} True are not supported"):
        caches_module.cache_groups(caches(made(kind, **{field: True})))


@pytest.mark.parametrize("knows", [False, True], ids=["0.23", "0.30"])
def test_only_a_vllm_from_0_30_on_has_layers_that_use_a_buffer_in_turn(
    monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    monkeypatch.setattr(caches_module, "HAS_TRANSFER_RESULTS", knows)
    layers = {
        "own": SimpleNamespace(kv_sharing_target_layer_name=None),
        "reader": SimpleNamespace(kv_sharing_target_layer_name="own"),
        "linear": SimpleNamespace(),
    }
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    readers = caches_module.readers_of_others(config)
    assert readers == (frozenset({"reader"}) if knows else None)
    memory = torch.zeros(4, 2, 16, 8)
    registered = describe(
        {"own": memory, "linear": memory},
        dict.fromkeys(("own", "linear"), LayerSpec(0, 16, 2, 2)),
        heads_first=True,
        readers=readers,
    )
    with (
        pytest.raises(LayoutError, match="own and linear use one buffer in turn, which decode cannot")
        if knows
        else nullcontext()
    ):
        _check_buffers(registered)


def test_layers_are_counted_as_vllm_ascend_counts_them() -> None:
    names = ["model.layers.10.attn", "model.layers.9.indexer.k_cache", "mtp.layers.0.attn", "model.layers.9.attn"]
    assert caches_module.layers_in_order(names) == [[names[1], names[3]], [names[0]], [names[2]]]


MODES = [mode.name for mode in interface.KVQuantMode]


@pytest.mark.parametrize("mode", MODES)
def test_quantized_caches_with_scales_or_packing_of_their_own_are_refused(mode: str) -> None:
    config = caches(made(FullAttentionSpec, kv_quant_mode=interface.KVQuantMode[mode]))
    if mode in ("NONE", "FP8_PER_TENSOR"):
        caches_module.cache_groups(config)
        return
    with pytest.raises(LayoutError, match=rf"layer\.0: caches quantized as {mode} \(--kv-cache-dtype\) are not"):
        caches_module.cache_groups(config)


@pytest.mark.skipif("num_head_slots" not in HAS, reason="this vLLM packs no heads")
def test_heads_that_are_packed_otherwise_are_refused() -> None:
    caches_module.cache_groups(caches(made(FullAttentionSpec, num_head_slots=2)))
    with pytest.raises(LayoutError, match="caches that keep 2 KV heads in 4 slots are not supported"):
        caches_module.cache_groups(caches(made(FullAttentionSpec, num_head_slots=4)))


@pytest.mark.skipif("bounded_replay" not in HAS, reason="this vLLM replays no prefixes")
def test_windows_whose_prefix_is_computed_again_are_refused() -> None:
    with pytest.raises(LayoutError, match="SlidingWindowMLASpec with bounded_replay True"):
        caches_module.cache_groups(caches(made(interface.SlidingWindowMLASpec, bounded_replay=True)))


@pytest.mark.parametrize(("field", "value"), [("host_resident", True), ("enable_kv_transfer", False)])
def test_a_group_that_is_not_to_be_transferred_is_refused(field: str, value: bool) -> None:
    caches_module.cache_groups(caches(made(FullAttentionSpec), made(FullAttentionSpec), **{field: not value}))
    with pytest.raises(LayoutError, match=r"layer\.1: caches that vLLM keeps in host memory or excludes"):
        caches_module.cache_groups(caches(made(FullAttentionSpec), made(FullAttentionSpec), **{field: value}))


@pytest.mark.parametrize("named", [True, False])
def test_copies_on_prefill_ranks_are_told_by_what_vllm_does(monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """vLLM 0.30 keeps copies, and has nothing yet by whose name one could tell."""
    if named:
        monkeypatch.setattr(ParallelConfig, "pcp_shard_decode_requests", True, raising=False)
    else:
        monkeypatch.delattr(ParallelConfig, "pcp_shard_decode_requests", raising=False)
    shares_in_023 = not hasattr(interface.KVCacheSpec, "tokens_per_state")
    assert vllm_view.prefill_ranks_hold_copies() is not shares_in_023
