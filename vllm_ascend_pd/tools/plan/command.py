# SPDX-License-Identifier: Apache-2.0
"""Turns the options of `vllm-ascend-pd plan` into its output."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine, default_block_size
from vllm_ascend_pd.tools.plan.exchange import PROMPT_TOKENS, make_plan
from vllm_ascend_pd.tools.plan.model import CacheDtype, read_model
from vllm_ascend_pd.tools.plan.rates import Traffic, make_rates
from vllm_ascend_pd.tools.plan.report import render
from vllm_ascend_pd.tools.plan.timing import make_timing


class EngineSizes(NamedTuple):
    """Sizes of one side's engines. `block_size` None means the layout's default."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    block_size: int | None = None


def plan_text(
    path: Path,
    layout: Layout,
    dtype: CacheDtype,
    prefill: EngineSizes,
    decode: EngineSizes,
    *,
    step_tokens: int,
    link_gbit: float | None,
    compute_ms: float | None,
    traffic: Traffic | None,
    as_json: bool,
) -> str:
    """Returns the tables, or JSON. `compute_ms` is per 1000 tokens. `traffic` needs it and `link_gbit`.

    Raises PlanError if the engines cannot work, OSError without a config.json.
    """
    model = read_model(path, dtype)
    block_size = default_block_size(model, layout)
    engines = [
        PlannedEngine(side, shape.tp, shape.pp, shape.dp, shape.block_size or block_size)
        for side, shape in (("prefill", prefill), ("decode", decode))
    ]
    slots = ConnectorConfig().slots(step_tokens)
    plan = make_plan(model, layout, *engines, step_tokens=step_tokens, staging_slots=slots)
    if link_gbit is not None:
        for_prompt = None if compute_ms is None else compute_ms * PROMPT_TOKENS / 1000
        timing = make_timing(plan, link_gbit, for_prompt)
        plan = msgspec.structs.replace(plan, timing=timing)
        if traffic is not None:
            plan = msgspec.structs.replace(plan, rates=make_rates(plan, timing, traffic))
    if as_json:
        return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"
    return render(plan)
