# SPDX-License-Identifier: Apache-2.0
"""Plans of DeepSeek V4, whose caches have one entry for several tokens."""

import json
from typing import Any

import pytest
from planned import DATA, plan_for

from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.figures import LayerKindFigures
from vllm_ascend_pd.tools.plan.model import CacheDtype, PlanError, parse_model, read_model
from vllm_ascend_pd.tools.plan.report import render
from vllm_ascend_pd.tools.plan.timing import make_timing

FLASH = DATA / "deepseek-v4-flash.json"
PRO = DATA / "deepseek-v4-pro.json"
CONFIG: dict[str, Any] = json.loads(FLASH.read_text())

KIB = 1024
TOKENS = 128 * KIB  # bytes of the window of 128 latents
# An entry for 4 tokens: 512 elements of two bytes, an index of 128 bytes and its scale of two.
FINE = LayerKindFigures(4, 0, (1024 + 128 + 2) / 4, TOKENS + 8 * (8 * KIB + 2 * KIB), 8192 * 288.5)
COARSE = LayerKindFigures(128, 0, 8, TOKENS + 128 * 4 * KIB, 8192 * 8)
WINDOW = LayerKindFigures(1, 0, 0, TOKENS, 0)


def of(kind: LayerKindFigures, layers: int) -> LayerKindFigures:
    return LayerKindFigures(kind.tokens_per_entry, layers, kind.bytes_per_token, kind.window_bytes, kind.step_bytes)


@pytest.mark.parametrize(
    ("config", "layers", "kinds", "per_token"),
    [
        (FLASH, 43, (of(WINDOW, 2), of(FINE, 21), of(COARSE, 20)), 6218.5),
        (PRO, 61, (of(FINE, 30), of(COARSE, 31)), 8903),
    ],
)
def test_bytes_per_token_layer_and_step(config, layers, kinds, per_token) -> None:
    model = plan_for(config, (16, 1, 1), (1, 1, 16)).model
    assert (model.layers, model.cached_layers, model.layer_kinds) == (layers, layers, kinds)
    assert (model.bytes_per_token, model.bytes_per_token_and_layer) == (per_token, 288.5)


def test_a_prompt_is_sent_by_blocks() -> None:
    """A prompt of 1000 tokens. Blocks hold 128 latents: of 1, 4 and 128 tokens."""
    plan = plan_for(FLASH, (16, 1, 1), (1, 1, 16))
    tokens = 43 * 2 * TOKENS  # 872 to 999: two blocks
    fine = 21 * 2 * (128 * KIB + 128 * 128 + 128 * 2)  # 250 entries: two blocks
    fine_states = 21 * 8 * (8 * KIB + 2 * KIB)  # 992 to 999: one block of 8
    coarse = 20 * 128 * KIB  # 7 entries: a block
    coarse_states = 20 * 5 * 32 * 4 * KIB  # 872 to 999: five blocks of 32
    assert plan.prompt.nbytes == tokens + fine + fine_states + coarse + coarse_states
    assert plan.senders[0].lanes == 16
    assert plan.staging.slots == 0
    assert make_timing(plan, 100, 90).transfer_ms == pytest.approx(plan.prompt.nbytes * 8 / 1e8)


def test_stages_and_blocks_that_differ() -> None:
    model = read_model(PRO)
    sides = PlannedEngine("prefill", 8, 2, 1, 64), PlannedEngine("decode", 2, 1, 1, 128)
    plan = make_plan(model, Layout.VLLM_ASCEND, *sides, step_tokens=4096, staging_slots=4)
    assert sum(plan.prefill.bytes_per_token) == plan.decode.bytes_per_token[0] == 8903
    assert {flow.source.pp_rank for flow in plan.prompt.flows} == {0, 1}
    assert plan.unit_tokens == 64


def test_the_table_names_the_layers() -> None:
    text = render(plan_for(FLASH, (2, 1, 1), (1, 1, 1)))
    assert "43 layers with compressed caches, latents of 512 bfloat16" in text
    assert "6,218.5 bytes per token, and 17.02 MiB per prompt for windows" in text
    assert "window only" in text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"compress_ratios": [4, 128]}, "compress_ratios is not a list with a number for each of 43 layers"),
        ({"compress_ratios": 4}, "compress_ratios is not a list"),
        ({"compress_ratios": [8] * 43}, "compress_ratios has 8, and vllm-ascend takes 0, 4 and 128"),
        ({"compress_ratios": ["4"] * 43}, "compress_ratios has '4'"),
        ({"index_head_dim": None}, "does not say index_head_dim"),
        ({"model_type": "deepseek_v5"}, "only deepseek_v4 is described, not deepseek_v5"),
    ],
)
def test_what_is_not_described(fields, reason) -> None:
    with pytest.raises(PlanError, match=reason):
        parse_model({**CONFIG, **fields})


def test_other_caches_of_this_model_are_refused() -> None:
    with pytest.raises(PlanError, match="with compressed caches, a KV cache of fp8 has another layout"):
        parse_model(CONFIG, CacheDtype.FP8)
    with pytest.raises(PlanError, match="compressed caches are only described for layout vllm-ascend"):
        plan_for(FLASH, (1, 1, 1), (1, 1, 1), Layout.VLLM_CPU)
    sides = PlannedEngine("prefill", 1, 1, 1, 16), PlannedEngine("decode", 1, 1, 1, 16)
    with pytest.raises(PlanError, match="prefill: compressed caches need a block size of 32, 64, 128, not of 16"):
        make_plan(parse_model(CONFIG), Layout.VLLM_ASCEND, *sides, step_tokens=4096, staging_slots=4)
