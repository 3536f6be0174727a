# SPDX-License-Identifier: Apache-2.0
"""A plan's figures: of known models against values worked out by hand, of any shape against the core."""

import dataclasses
import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from planned import DEEPSEEK, LLAMA, QWEN, assert_conserved, attention, plan_for

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.caches import TokenGroup, describe, left_to_decode
from vllm_ascend_pd.core.layout import LayerSpec
from vllm_ascend_pd.core.plan import make_mapping
from vllm_ascend_pd.core.states import LayerState, partition_states, state_geometries
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.tools.command_line import as_json
from vllm_ascend_pd.tools.doctor.report import make_report, ok
from vllm_ascend_pd.tools.plan.engine import PlannedEngine, rank_caches, stage_layers
from vllm_ascend_pd.tools.plan.exchange import make_plan, size_of
from vllm_ascend_pd.tools.plan.layers import ModelShape, linear_state
from vllm_ascend_pd.tools.plan.model import CacheDtype, PlanError, read_model
from vllm_ascend_pd.tools.plan.times import Traffic, make_rates, read_measured, write_times
from vllm_ascend_pd.tools.write_costs import HIXL, KIB

# 1000 tokens travel as 8 blocks of 128.
SENT_TOKENS = 1024


def test_deepseek_r1_tp16_to_dp4_tp4():
    plan = plan_for(DEEPSEEK, (16, 1, 1), (4, 1, 4))
    assert plan.bytes_per_token == 61 * 1152 == 70_272
    # All ranks hold the latent; four of them serve a request, each to one decode rank.
    sent = [(flow.source.tp_rank, flow.lane, flow.target.tp_rank) for flow in plan.prompt.flows]
    assert sent == [(rank, rank // 4, rank % 4) for rank in range(16)]
    assert (plan.lanes, plan.regrouping) == (4, ())
    assert (plan.staging.groups, plan.staging.total_bytes) == (0, 0)
    assert plan.prompt.busiest_reader == SENT_TOKENS * 70_272
    assert plan.prompt.busiest_sender == SENT_TOKENS * 70_272
    assert plan.prompt.nbytes == 4 * plan.prompt.busiest_sender
    assert plan.prompt.descriptors == 61 * 2 * 8 * 4
    assert plan.prompt.descriptors_contiguous == 61 * 2 * 4
    assert_conserved(plan)


def int8_model(folder: Path, config: Path, **described: str) -> ModelShape:
    text = (config / "config.json" if config.is_dir() else config).read_text(encoding="utf-8")
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / "quant_model_description.json").write_text(json.dumps(described), encoding="utf-8")
    return read_model(folder)


def test_llama_70b_in_int8_on_decode_tp8_to_tp4(tmp_path: Path) -> None:
    scales = {f"model.layers.{layer}.self_attn.k_proj.kv_cache_scale": "FLOAT" for layer in range(80)}
    model = int8_model(tmp_path, LLAMA, kv_cache_type="C8", **scales)
    plan = _plan(model, (8, 1), (4, 1), 128, 128, 1000)
    # Each rank writes its own head: no heads are exchanged.
    assert plan.staging.groups == 0
    assert plan.regrouping == ("quantized",)
    assert [(flow.source.tp_rank, flow.target.tp_rank) for flow in plan.prompt.flows] == [(r, r // 2) for r in range(8)]
    assert plan.prompt.room == SENT_TOKENS * 80 * 512
    assert plan.prompt.nbytes == SENT_TOKENS * 80 * 8 * 2 * 128
    # K and V of one head in int8, or one of them in 16 bits, for a step of 64 tokens and two blocks.
    assert plan.staging.slot_bytes == (64 + 2 * 128) * 256


def test_a_latent_in_int8_on_decode(tmp_path: Path) -> None:
    scales = {f"model.layers.{layer}.self_attn.fa_k.scale": "FLOAT" for layer in range(1, 61)}
    model = int8_model(tmp_path, DEEPSEEK, fa_quant_type="FAKQuant", **scales)
    plan = _plan(model, (4, 1), (1, 1), 128, 128, 1000)
    assert plan.prompt.room == SENT_TOKENS * (1152 + 60 * (512 + 128))
    assert plan.prompt.nbytes == SENT_TOKENS * (1152 + 60 * (512 + 128))
    assert plan.staging.slot_bytes == (64 + 2 * 128) * 1024
    with pytest.raises(PlanError, match="so both sides need the same block size"):
        _plan(model, (4, 1), (1, 1), 128, 64, 1000)


def test_llama_70b_tp8_to_tp4():
    plan = plan_for(LLAMA, (8, 1, 1), (4, 1, 1))
    assert plan.bytes_per_token == 80 * 8 * (128 + 128) * 2 == 327_680
    # A rank is in one group of each size.
    assert (plan.staging.groups, plan.staging.communicator_bytes) == (3, 3 * 2 * 16 * 1024**2)
    assert plan.regrouping == ("exchanged",)
    # Whole blocks, two heads wide: every other rank has half of them.
    for rank, flow in enumerate(plan.prompt.flows):
        assert (flow.source.tp_rank, flow.target.tp_rank, flow.exchanging) == (rank, rank // 2, 2)
        assert flow.scattered == {layer: {128 * 2 * 256: 2 * 4} for layer in range(80)}
    assert plan.prompt.nbytes == SENT_TOKENS * 327_680
    assert (plan.prompt.descriptors, plan.prompt.descriptors_contiguous) == (80 * 2 * 8 * 4, 80 * 2 * 8)
    assert_conserved(plan)


@pytest.mark.parametrize("pp", [1, 2])
def test_llama_70b_tp4_to_tp8(pp):
    plan = plan_for(LLAMA, (4, pp, 1), (8, 1, 1))
    assert plan.regrouping == ("dealt out",)
    sent = [(flow.source.tp_rank, flow.target.tp_rank) for flow in plan.prompt.flows]
    assert sent == [(rank // 2, rank) for rank in range(8)] * pp
    assert all(each == {128 * 256: 2 * 8} for flow in plan.prompt.flows for each in flow.scattered.values())
    assert plan.prompt.nbytes == SENT_TOKENS * 327_680
    assert plan.prompt.busiest_sender == plan.prompt.nbytes // 4 // pp
    assert plan.prompt.busiest_reader == plan.prompt.nbytes // 8
    assert (plan.prompt.descriptors, plan.prompt.descriptors_contiguous) == (80 * 2 * 8 * 8, 80 * 2 * 8)
    assert_conserved(plan)


# --- times ---------------------------------------------------------------------------------------------------


def test_a_layers_writes_by_hixls_figures():
    """Llama 70B, TP 8 to 4: a rank writes K and V of 4 of 8 units, of 64 KiB each or as 256 KiB together."""
    plan = plan_for(LLAMA, (8, 1, 1), (4, 1, 1))
    times = write_times(plan, HIXL)
    assert [time.costs for time in times] == [*HIXL]
    for costs, time in zip(HIXL, times, strict=True):
        assert time.scattered_ms == pytest.approx(8 * costs.seconds(64 << 10) * 1000)
        assert time.contiguous_ms == pytest.approx(2 * costs.seconds(256 << 10) * 1000)
        # It has half of the heads of 8 units, and half of those bytes are another rank's.
        assert time.exchange_ms == pytest.approx((256 << 10) / costs.exchange / 1e6)
        slow = time.scattered_ms > 1.5 * (512 << 10) / costs.most / 1e6
        assert time.limited_by == ("descriptors" if slow else "link")
    assert {time.limited_by for time in times} == {"descriptors", "link"}


def test_an_all_to_all_that_takes_longer_than_the_writes_limits_a_layer():
    slow = dataclasses.replace(HIXL[0], exchange=0.1)
    unknown = dataclasses.replace(HIXL[0], exchange=None)
    times = write_times(plan_for(LLAMA, (8, 1, 1), (4, 1, 1)), (slow, unknown))
    assert [time.limited_by for time in times] == ["all-to-all", "descriptors"]
    assert times[1].exchange_ms is None
    assert {time.exchange_ms for time in write_times(plan_for(LLAMA, (4, 1, 1), (4, 1, 1)), HIXL)} == {0.0}


def measured(folder: Path, *findings: tuple[str, dict[str, float | str]]) -> Path:
    """What `doctor --json` prints of such findings."""
    report = folder / "report.json"
    report.write_text(as_json(make_report("machine", [ok(check, "found", **figures) for check, figures in findings])))
    return report


def test_what_the_doctor_measured_replaces_hixls_figures(tmp_path: Path) -> None:
    report = measured(
        tmp_path,
        ("hardware.collectives", {"mode": "AIV", "all_to_all_bytes_per_second": 50e9}),
        ("descriptors.hccs.65536", {"protocol": "ascend", "bytes": 65536, "seconds": 2e-6}),
        ("descriptors.hccs.32768", {"protocol": "ascend", "bytes": 32768, "seconds": 1.5e-6}),
    )
    [costs] = read_measured(report)
    assert (costs.chip, costs.link, costs.sizes) == ("measured", "hccs", (32768, 65536))
    assert costs.exchange == 50
    assert [costs.seconds(size) for size in (16384, 32768, 65536)] == pytest.approx([1.5e-6, 1.5e-6, 2e-6])
    [time] = write_times(plan_for(LLAMA, (8, 1, 1), (4, 1, 1)), [costs])
    assert time.scattered_ms == pytest.approx(8 * 2e-3)


@pytest.mark.parametrize(
    "figures", [{}, {"bytes": 0, "seconds": 1.0}, {"bytes": 16384, "seconds": 0.0}, {"bytes": 1, "seconds": "soon"}]
)
def test_a_report_that_cannot_be_used(tmp_path: Path, figures: dict[str, float | str]) -> None:
    with pytest.raises(PlanError, match="no report of doctor"):
        read_measured(measured(tmp_path, ("descriptors.hccs.16384", figures)))


def test_a_report_without_measured_descriptors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="needs --hardware"):
        read_measured(measured(tmp_path, ("versions.cann", {})))


def test_rates_of_deepseek_r1():
    """The rates of published figures, worked out by hand.

    CloudMatrix-Infer (arXiv 2506.12708) has 6,688 prefill tokens/s per Ascend 910C, two ranks: 18.7 ms per 1,000 tokens
    with TP 16. A decode step takes 15 ms at 538 tokens/s and 50 ms at 1,943: by the line through these points, 19.3 ms
    for 37 requests on four ranks.
    """
    plan = plan_for(DEEPSEEK, (16, 1, 1), (4, 1, 4), tokens=4096)
    rates = make_rates(plan, 4.096 * 18.7, Traffic(1500, step_ms=19.3, requests=48, kv_gib=14, link_gbit=200))
    assert rates.prefill["computing"] == pytest.approx(1 / (4.096 * 0.0187))
    # A prefill rank sends the latent to 4 decode ranks, and each of 16 prefill ranks serves one request of 16.
    sent = 4096 * 70_272 / 25e9
    assert rates.prefill["link"] == pytest.approx(16 / (4 * sent))
    assert rates.decode["link"] == pytest.approx(4 / sent)
    assert rates.decode["steps"] == pytest.approx(4 * 48 / (1500 * 0.0193))
    # Every decode rank holds the latent: 38 requests of 44 blocks fit. Each is there for its prefill, too.
    assert 14 * 2**30 // (44 * 128 * 70_272) == 37
    assert rates.decode["KV cache"] == pytest.approx(4 * 37 / (1500 * 0.0193 + 4.096 * 0.0187))
    assert rates.prefill_per_decode == pytest.approx(rates.decode["KV cache"] / rates.prefill["computing"])


@pytest.mark.parametrize(("first", "waits_s"), [(4095, 4096 * 70_272 / 25e9), (4096, 4.096 * 0.0187)])
def test_blocks_of_prompts_that_are_computed_first_wait_for_the_link_alone(first, waits_s):
    plan = plan_for(DEEPSEEK, (16, 1, 1), (4, 1, 4), tokens=4096)
    rates = make_rates(plan, 4.096 * 18.7, Traffic(1500, 19.3, 48, 14, 200, prefill_first_tokens=first))
    assert rates.decode["KV cache"] == pytest.approx(4 * 37 / (1500 * 0.0193 + waits_s))


@pytest.mark.parametrize(
    ("link_gbit", "step_ms", "requests", "limits"),
    [
        (200, 19.3, 48, ("computing", "KV cache")),
        (200, 19.3, 4, ("computing", "steps")),
        (0.1, 19.3, 48, ("link", "link")),
    ],
)
def test_the_slowest_part_of_each_side_decides_the_ratio(link_gbit, step_ms, requests, limits):
    plan = plan_for(DEEPSEEK, (16, 1, 1), (4, 1, 4), tokens=4096)
    rates = make_rates(plan, 4.096 * 18.7, Traffic(1500, step_ms, requests, 14, link_gbit))
    prefill, decode = rates.prefill[limits[0]], rates.decode[limits[1]]
    assert (prefill, decode) == (min(rates.prefill.values()), min(rates.decode.values()))
    assert rates.prefill_per_decode == pytest.approx(decode / prefill)


# --- what descriptors take by HIXL's table -------------------------------------------------------------------

HCCS = next(each for each in HIXL if str(each) == "A3, HCCS, two machines, comm")
A2 = next(each for each in HIXL if str(each) == "A2, RoCE, one machine, comm")


def test_measured_sizes_take_what_was_measured() -> None:
    for costs in HIXL:
        for n, rate in enumerate(costs.rates):
            size = (16 << n) * KIB
            assert costs.seconds(size) == pytest.approx(size / rate / 1e9)


def test_sizes_between_and_beyond() -> None:
    assert HCCS.seconds(1) == HCCS.seconds(16 * KIB)
    assert HCCS.seconds(48 * KIB) == pytest.approx((HCCS.seconds(32 * KIB) + HCCS.seconds(64 * KIB)) / 2)
    assert A2.seconds(129 * KIB) == A2.seconds(128 * KIB), "the longest measured one is not limited by the link"
    assert A2.seconds(64 * 1024 * KIB) == pytest.approx(64 * 1024 * KIB / 23.7e9)


# --- any shape -----------------------------------------------------------------------------------------------


def _plan(
    model: ModelShape,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    p_block: int,
    d_block: int,
    tokens: int,
):
    engines = (PlannedEngine("prefill", *prefill, 1, p_block), PlannedEngine("decode", *decode, 1, d_block))
    return make_plan(model, *engines, step_tokens=64, staging_slots=2, tokens=tokens)


@st.composite
def _shapes(draw):
    heads = draw(st.integers(1, 12))
    tps = [tp for tp in range(1, 13) if tp % heads == 0 or heads % tp == 0]
    prefill, decode = (draw(st.sampled_from(tps)) for _ in range(2))
    dtype = draw(st.sampled_from(CacheDtype))
    widths = draw(st.sampled_from([(8, 8), (16, 4)]))
    full = attention(heads, *widths, dtype=dtype.torch_name, itemsize=dtype.itemsize)
    windows = [dataclasses.replace(full, window=window) for window in (1, 7, 100)]
    chunk = dataclasses.replace(full, chunk=draw(st.sampled_from([16, 50])))
    of_state = math.lcm(prefill, decode)
    state = linear_state((of_state, 4), (2 * of_state, 3), 3, ("bfloat16", 2), ("float32", 4))
    kinds = [(full,), *((window,) for window in windows), (chunk,), (state,), ()]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    assume(any(caches and not caches[0].is_state for caches in layers))
    blocks = [(16, 16), (64, 64), (16, 64), (48, 16), (30, 30)]
    model = ModelShape("any", of_state, tuple(layers), mla=heads == 1 and draw(st.booleans()))
    stages = (draw(st.integers(1, min(3, len(layers)))) for _ in range(2))
    p_block, d_block = draw(st.sampled_from(blocks))
    return (
        model,
        *zip((prefill, decode), stages, strict=True),
        p_block,
        d_block,
        draw(st.integers(1, 200)),
    )


@given(_shapes())
def test_any_shape_covers_what_the_core_does(shape):
    plan = _plan(*shape)
    assert plan.prompt.units == -(-(shape[-1] - plan.model.leaves_last_token) // plan.unit_tokens)
    assert_conserved(plan)


@given(_shapes())
def test_any_shape_has_one_descriptor_per_piece_unless_neighbours_merge(shape):
    plan = _plan(*shape)
    model, prefill, decode, p_block, d_block, _ = shape
    sides = sharding(prefill[0]), sharding(decode[0])
    for flow in plan.prompt.flows:
        caches = rank_caches(model, PlannedEngine("prefill", *prefill, 1, p_block), flow.source.pp_rank, 0, 1)
        for layer, scattered in flow.scattered.items():
            [cache], contiguous = model.layers[layer], flow.contiguous[layer]
            assert size_of(contiguous) == size_of(scattered)
            assert contiguous.total() <= scattered.total()
            if cache.is_state:
                continue
            geometries = [caches.geometry_of(each) for each in caches.tensors if each.layer.split(".")[2] == str(layer)]
            mappings = [make_mapping(each, flow.source.tp_rank, *sides, d_block) for each in geometries]
            pieces = [
                target for mapping in mappings for target in mapping.portions if target.tp_rank == flow.target.tp_rank
            ]
            most = plan.prompt.units * len(pieces)
            assert scattered.total() <= most
            if p_block == d_block and flow.exchanging == 1 and not cache.is_bounded:
                assert scattered.total() == most


# --- what the figures rest on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (LLAMA, [(3, 128, 2, 128), (3, 128, 2, 128)]),
        (QWEN, [(3, 128, 1, 128), (3, 128, 1, 128)]),
        (DEEPSEEK, [(3, 128, 1, 512), (3, 128, 1, 64)]),
    ],
)
def test_expected_caches_are_described_as_registered_ones_are(config, shapes):
    """`shapes`: of the tensors that vLLM registers for a layer with TP 4 (two of Llama's 8 heads, one of Qwen's)."""
    model = read_model(config)
    expected = rank_caches(model, PlannedEngine("prefill", 4, 1, 1, 128), 0, 0, 3)
    name = "model.layers.0.self_attn.attn"
    registered = {name: tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)}
    [cache] = model.kinds
    heads = cache.tensors[0].heads
    spec = LayerSpec(0, 128, max(1, heads // 4), heads)
    described = describe(registered, {name: spec}, heads_first=False).description
    ours = [expected.geometry_of(tensor) for tensor in expected.tensors if tensor.layer == name]
    assert ours == [described.geometry_of(tensor) for tensor in described.tensors]


@given(st.integers(0, 300), st.integers(1, 100))
def test_what_a_token_sees_is_what_it_sees_in_the_connector(token, size):
    for kind in ({"window": size}, {"chunk": size}, {}):
        cache = dataclasses.replace(attention(1, 8, 8), **kind)
        group = TokenGroup(16, windowed=bool(kind), **kind)
        assert cache.seen_from(token) == group.seen_from(token)
        assert ModelShape("any", 1, ((cache,),)).leaves_last_token == left_to_decode([group])


def test_expected_states_are_described_as_registered_ones_are():
    """On a rank of TP 4: 4 of 16 heads of keys and 8 of 32 of values, as vLLM shapes them for Qwen3-Next."""
    state = linear_state((16, 128), (32, 128), 4, ("bfloat16", 2), ("float32", 4))
    model = ModelShape("any", 16, ((state,), (attention(2, 256, 256),)))
    expected = rank_caches(model, PlannedEngine("prefill", 4, 1, 1, 128), 0, 1, 3)
    shapes = (3, 2 * 4 * 128 + 8 * 128), (8, 128, 128)
    described = [
        geometry
        for shape, (dtype, itemsize), (axis, sections) in zip(
            shapes, (("bfloat16", 2), ("float32", 4)), partition_states("GDN_ATTN", 4, None, 1, shapes), strict=True
        )
        for _, geometry in state_geometries(LayerState(shape, dtype, itemsize, axis, sections), 0, 1)
    ]
    ours = [expected.geometry_of(tensor) for tensor in expected.tensors if tensor.layer.endswith(".state")]
    assert [msgspec.structs.replace(each, block_stride=1) for each in ours] == [
        msgspec.structs.replace(each, block_stride=1) for each in described
    ]


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [
        (80, 2, [40, 40]),
        (61, 2, [31, 30]),
        (61, 4, [15, 15, 16, 15]),
        (94, 4, [23, 24, 24, 23]),
        (7, 4, [2, 2, 2, 1]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_layers_of_stages(layers, pp, counts):
    stages = stage_layers(layers, pp)
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ((3, 1), (1, 1), "prefill: tensor parallel size 3 does not divide 64 attention"),
        ((1, 1), (128, 1), "decode: tensor parallel size 128 does not divide 64 attention"),
        ((1, 81), (1, 1), "prefill: pipeline parallel size 81 leaves stages without"),
    ],
)
def test_shapes_that_cannot_work(prefill, decode, reason):
    with pytest.raises(PlanError, match=reason):
        _plan(read_model(LLAMA), prefill, decode, 128, 128, 1000)


def test_block_sizes_that_do_not_divide():
    plan = _plan(read_model(LLAMA), (1, 1), (1, 1), 128, 96, 1000)
    assert plan.unit_tokens == 32
    assert any("32 tokens at a time" in note for note in plan.notes)


def test_heads_that_cannot_be_dealt_out():
    model = ModelShape("six of twelve", 12, ((attention(6, 8, 8),),))
    with pytest.raises(PlanError, match="decode: tensor parallel size 4 and 6 KV heads: neither divides the other"):
        _plan(model, (2, 1), (4, 1), 128, 128, 1000)
    with pytest.raises(topology.TopologyError):
        topology.replicas(4, 6)
