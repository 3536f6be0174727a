# SPDX-License-Identifier: Apache-2.0
"""Whether a prefill and a decode engine fit together, as far as their commands and the model's shape tell."""

from __future__ import annotations

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.tools.migrate.arguments import EngineArguments
from vllm_ascend_pd.tools.migrate.changes import Change, ChangeKind
from vllm_ascend_pd.tools.migrate.model_facts import ModelFacts
from vllm_ascend_pd.tools.plan.engine import DEFAULT_BLOCK_SIZE, PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import ModelShape, PlanError

# Options that must be the same on both sides, because they change what KV means.
_SAME = ("kv-cache-dtype", "quantization", "dtype", "hf-overrides")


def check_pair(prefill: EngineArguments, decode: EngineArguments, served: ModelFacts) -> list[Change]:
    """`served`: what is known of the model."""
    found, model = [], served.shape
    if prefill.model.rstrip("/") != decode.model.rstrip("/"):
        why = f"prefill serves {prefill.model}, decode {decode.model}: weights that differ are refused at first contact"
        if served.media:
            why += ". Prompts with images are refused: vLLM's hash of an image includes the path. Use one path"
        found.append(Change(ChangeKind.CHECK, "model", why))
    for name in _SAME:
        if (left := _value(prefill, name)) != (right := _value(decode, name)):
            why = f"prefill has {left or 'none'}, decode {right or 'none'}: KV would be of another model"
            found.append(Change(ChangeKind.STOPS, f"--{name}", why))
    found += _drafts(prefill, decode)
    most = [side.number("max-model-len", 0) for side in (prefill, decode)]
    if all(most) and most[0] < most[1]:
        why = f"prefill takes {most[0]} tokens, decode {most[1]}: longer prompts than prefill's fail"
        found.append(Change(ChangeKind.CHECK, "--max-model-len", why))
    if model is not None:
        try:
            _plan(prefill, decode, model)
        except PlanError as error:
            found.append(Change(ChangeKind.STOPS, "parallel sizes", str(error)))
    return found


def _drafts(prefill: EngineArguments, decode: EngineArguments) -> list[Change]:
    methods = [side.speculation.get("method") for side in (prefill, decode)]
    if methods[0] == methods[1]:
        return []
    why = (
        f"prefill speculates with {methods[0]}, decode with {methods[1]}: the draft's KV of prompts is not sent, so "
        "fewer of its tokens are accepted. Answers are the same"
    )
    return [Change(ChangeKind.CHECK, "--speculative-config", why)]


def _plan(prefill: EngineArguments, decode: EngineArguments, model: ModelShape) -> None:
    sides = [_planned(name, side) for name, side in (("prefill", prefill), ("decode", decode))]
    tokens = prefill.number("max-num-batched-tokens", 2048)
    make_plan(model, *sides, step_tokens=tokens, staging_slots=ConnectorConfig().slots(tokens))


def _planned(name: str, side: EngineArguments) -> PlannedEngine:
    return PlannedEngine(
        name,
        side.number("tensor-parallel-size", 1),
        side.number("pipeline-parallel-size", 1),
        side.number("data-parallel-size", 1),
        side.number("block-size", DEFAULT_BLOCK_SIZE),
    )


def _value(side: EngineArguments, name: str) -> object:
    """Returns what must be the same on both sides, JSON as an object."""
    return side.json(name) if name == "hf-overrides" else side.text(name)
