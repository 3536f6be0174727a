# SPDX-License-Identifier: Apache-2.0
"""Plans of known models and engines, and what must hold of every plan."""

from pathlib import Path

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.tools.plan.engine import DEFAULT_BLOCK_SIZE, PlannedEngine, stage_layers
from vllm_ascend_pd.tools.plan.exchange import PlanFigures, make_plan
from vllm_ascend_pd.tools.plan.layers import LayerCache, TensorEntry
from vllm_ascend_pd.tools.plan.model import read_model

DATA = Path(__file__).parent / "data"
DEEPSEEK = DATA / "deepseek-r1.json"
QWEN = DATA / "qwen3-235b-a22b.json"
LLAMA = DATA / "llama-3.1-70b.json"


def plan_for(
    config: Path,
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
    tokens: int = 1000,
) -> PlanFigures:
    """Engines as (TP, PP, DP)."""
    return make_plan(
        read_model(config),
        PlannedEngine("prefill", *prefill, DEFAULT_BLOCK_SIZE),
        PlannedEngine("decode", *decode, DEFAULT_BLOCK_SIZE),
        step_tokens=8192,
        staging_slots=4,
        tokens=tokens,
    )


def attention(heads: int, *widths: int, dtype: str = "bfloat16", itemsize: int = 2) -> LayerCache:
    """The cache of a layer of attention. `widths`: elements of a head, by tensor."""
    return LayerCache("attn", tuple(TensorEntry(dtype, itemsize, heads, width) for width in widths))


def assert_conserved(plan: PlanFigures) -> None:
    """For a request on any lane, every decode rank gets once what it needs of each cache, from the ranks it waits for;
    nothing else is sent."""
    model, decode, prompt = plan.model, plan.decode, plan.prompt
    sides = sharding(decode.tp), sharding(plan.prefill.tp)
    for lane in range(plan.lanes):
        flows = [flow for flow in prompt.flows if flow.lane == lane]
        assert lane or sum(flow.nbytes for flow in flows) == prompt.nbytes
        for stage, layers in enumerate(stage_layers(len(model.layers), decode.pp)):
            caches = [cache for layer in layers for cache in model.layers[layer]]
            for reader in range(decode.tp):
                to_it = [flow for flow in flows if flow.target == (stage, reader)]
                assert sum(flow.nbytes for flow in to_it) == sum(_needed(plan, cache) for cache in caches)
                writers = {
                    writer
                    for cache in caches
                    for tensor in cache.tensors
                    for writer in topology.writers_to(reader, *sides, tensor.heads, lane, not cache.is_state)
                }
                assert {flow.source.tp_rank for flow in to_it} == writers


def _needed(plan: PlanFigures, cache: LayerCache) -> int:
    """Bytes that a decode rank needs of a cache for the plan's prompt, in whole units."""
    tokens, unit, block = plan.prompt.tokens, plan.unit_tokens, plan.decode.block_size
    entry = sum(max(1, tensor.heads // plan.decode.tp) * tensor.head_bytes for tensor in cache.tensors)
    if cache.is_state:
        return entry
    last = tokens - 1 if plan.model.leaves_last_token else tokens
    first = max(0, tokens - cache.window) if cache.window else 0
    first = (tokens - 1) // cache.chunk * cache.chunk if cache.chunk else first
    return entry * (-(-last // unit) * unit - first // block * block)
