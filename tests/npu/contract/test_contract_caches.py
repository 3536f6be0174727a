# SPDX-License-Identifier: Apache-2.0
"""The caches that vllm-ascend registers, and their specs."""

from pathlib import Path

import pytest
from vllm_ascend_contract import BLOCK, Event, only, recorded

from harness.models import TINY

pytestmark = pytest.mark.npu

ALIGNMENT = 2 << 20


def test_dense_caches_are_k_and_v_by_token(dense_model: Path) -> None:
    events = recorded(dense_model, "kv_producer")
    [registered] = only(events, "register_kv_caches")
    assert list(registered["caches"]) == [f"model.layers.{i}.self_attn.attn" for i in range(TINY.layers)]
    for layer, cache in registered["caches"].items():
        k, v = cache["shapes"]
        assert k == v, f"{layer}: K {k} and V {v} have different shapes"
        assert k[1:] == [BLOCK, TINY.kv_heads, TINY.head_size], (
            f"{layer}: not [num_blocks, block size, KV heads, head size] but {k}"
        )
    # The prompt repeats one token, so in the first layer V is equal in all rows and K, rotated by position, is not.
    first = only(events, "save_kv_layer")[0]
    assert first["constant"] == [False, True], "a layer's cache is no longer the tuple (K, V)"


def test_mla_caches_are_latent_and_rope(mla_model: Path) -> None:
    events = recorded(mla_model, "kv_producer")
    [registered] = only(events, "register_kv_caches")
    for layer, cache in registered["caches"].items():
        assert [shape[1:] for shape in cache["shapes"]] == [[BLOCK, 1, 512], [BLOCK, 1, 64]], (
            f"{layer}: not the latent and the rope part, but {cache['shapes']}"
        )
    assert only(events, "save_kv_layer")[0]["constant"] == [True, False], "the order is no longer (latent, rope)"


def test_caches_can_be_registered_for_transfer(prefill_events: tuple[Event, ...]) -> None:
    [registered] = only(prefill_events, "register_kv_caches")
    for layer, cache in registered["caches"].items():
        assert cache["type"] == "tuple", f"{layer}: its cache is a {cache['type']}"
        assert all(cache["contiguous"]), f"{layer}: its tensors are not contiguous"
        assert set(cache["devices"]) == {"npu"}
        assert [address % ALIGNMENT for address in cache["addresses"]] == [0, 0], (
            f"{layer}: with P/D its tensors no longer begin at multiples of 2 MiB, which HCCS needs"
        )


def test_specs_have_what_we_read(prefill_events: tuple[Event, ...]) -> None:
    [registered] = only(prefill_events, "register_kv_caches")
    assert registered["specs"].keys() == registered["caches"].keys(), "layers with a cache but without a cache group"
    mla = registered["caches"]["model.layers.0.self_attn.attn"]["shapes"][0][-1] == 512
    heads = 1 if mla else TINY.kv_heads
    for layer, spec in registered["specs"].items():
        assert spec["num_kv_heads"] == heads, f"{layer}: {spec['kind']}.num_kv_heads is {spec['num_kv_heads']}"
        assert spec["block_size"] == BLOCK, f"{layer}: blocks of {spec['block_size']}, although P/D has 128 only"
        assert ("MLA" in spec["kind"]) == mla, f"compat.layer_specs tells MLA by the name, which is {spec['kind']}"
    assert set(map(tuple, registered["ours"].values())) == {(0, BLOCK, heads, heads)}
