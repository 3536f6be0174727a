# SPDX-License-Identifier: Apache-2.0
"""Models, and how fast a rank is taken to compute them; docs/simulator.md says where each number is from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_pd.tools.plan.model import ModelShape, parse_model, read_model

_DATA = Path(__file__).resolve().parents[2] / "tests" / "unit" / "data"
_LLAMA_8B: Mapping[str, Any] = {
    **json.loads((_DATA / "llama-3.1-70b.json").read_text()),
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
MODELS = ("deepseek-r1", "llama-3.1-70b", "llama-3.1-8b", "qwen3-235b-a22b")


@dataclass(frozen=True)
class Speeds:
    """`prefill_tokens`: that one rank computes per second. A step of decode takes `decode_step_ms`, and
    `decode_request_ms` for each request per rank. `decode_slots`: requests per rank, at most; `decode_kv_gb`: memory of
    a rank for KV."""

    prefill_tokens: float
    decode_step_ms: float
    decode_request_ms: float
    decode_slots: float
    decode_kv_gb: float


SPEEDS = {
    "deepseek-r1": Speeds(3344, 11.8, 0.786, 48, 15),
    "llama-3.1-8b": Speeds(11750, 10.0, 0.1, 256, 35),
}
"""A rank is one of the two dies of an Ascend 910C."""


def find_model(name: str) -> ModelShape:
    """One of `MODELS`, or a path to a `config.json`. Raises PlanError, OSError."""
    if name == "llama-3.1-8b":
        return parse_model(_LLAMA_8B)
    return read_model(_DATA / f"{name}.json" if name in MODELS else Path(name))
