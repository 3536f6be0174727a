# SPDX-License-Identifier: Apache-2.0
"""Plans of known models and engines, and what must hold of every plan."""

from pathlib import Path

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.tools.plan.engine import DEFAULT_BLOCK_SIZE, PlannedEngine, stage_layers
from vllm_ascend_pd.tools.plan.exchange import PlanFigures, make_plan
from vllm_ascend_pd.tools.plan.model import read_model

DATA = Path(__file__).parent / "data"
DEEPSEEK = DATA / "deepseek-r1.json"
QWEN = DATA / "qwen3-235b-a22b.json"
LLAMA = DATA / "llama-3.1-70b.json"


def plan_for(
    config: Path,
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
) -> PlanFigures:
    """Engines as (TP, PP, DP)."""
    return make_plan(
        read_model(config),
        PlannedEngine("prefill", *prefill, DEFAULT_BLOCK_SIZE),
        PlannedEngine("decode", *decode, DEFAULT_BLOCK_SIZE),
        step_tokens=8192,
        staging_slots=4,
    )


def assert_conserved(plan: PlanFigures, attention_layers: list[bool], itemsize: int) -> None:
    """For a request on any lane, every decode rank gets each layer, head and token of its own once, from the ranks it
    waits for; nothing else is sent."""
    decode, prompt = plan.decode, plan.prompt
    per_head = prompt.units * plan.unit_tokens * sum(plan.model.widths) * itemsize
    heads = max(1, plan.model.kv_heads // decode.tp)
    for lane in range(plan.lanes):
        flows = [flow for flow in prompt.flows if flow.lane == lane]
        assert sum(flow.nbytes for flow in flows) == prompt.nbytes
        for stage, layers in enumerate(stage_layers(len(plan.model.cached), decode.pp)):
            for reader in range(decode.tp):
                to_it = [flow for flow in flows if flow.target == (stage, reader)]
                cached = sum(attention_layers[layer] for layer in layers)
                assert sum(flow.nbytes for flow in to_it) == cached * heads * per_head
                if cached:
                    sides = sharding(decode.tp), sharding(plan.prefill.tp)
                    writers = topology.writers_to(reader, *sides, plan.model.kv_heads, lane, True)
                    assert tuple(sorted({flow.source.tp_rank for flow in to_it})) == writers
