# SPDX-License-Identifier: Apache-2.0
"""Reads what matters of the model that an engine serves: its `config.json`, and how its caches are quantized."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_pd.tools.plan.model import CacheDtype, ModelShape, PlanError, read_model

_QUANTIZATION = "quant_model_description.json"  # ModelSlim's, as vllm-ascend reads it

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFacts:
    shape: ModelShape | None  # None if it cannot be described
    problem: str | None = None  # why not, if that means that the engine may be refused
    int8_caches: str | None = None  # the setting by which vllm-ascend keeps decode's caches in int8
    experts: bool = True  # whether it has experts (MoE)
    media: bool = False  # whether it takes images

    @property
    def compressed(self) -> bool:
        """Whether its caches have one entry for several tokens."""
        return self.shape is not None and bool(self.shape.compressed)


def read_facts(path: str, kv_cache_dtype: str | None) -> ModelFacts:
    """`path`: a folder with config.json, or that file. `kv_cache_dtype`: of the engine."""
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    shape, problem = None, None
    try:
        shape = read_model(given, _dtype(kv_cache_dtype))
    except OSError:
        return ModelFacts(None, f"there is no config.json at {path!r} on this host: give --model FOLDER")
    except PlanError as error:
        problem = str(error)
    try:
        config = json.loads((given / "config.json" if given.is_dir() else given).read_text(encoding="utf-8"))
    except ValueError:
        return ModelFacts(None, problem)
    text = config.get("text_config") or config
    experts = any(isinstance(text.get(field), int) and text[field] > 1 for field in _EXPERTS)
    int8 = _int8_caches(folder / _QUANTIZATION)
    return ModelFacts(shape, problem, int8, experts, "vision_config" in config)


def _dtype(name: str | None) -> CacheDtype:
    if name is None:
        return CacheDtype.AUTO
    if name.startswith("fp8"):
        return CacheDtype.FP8
    try:
        return CacheDtype(name)
    except ValueError:
        raise PlanError(f"--kv-cache-dtype {name}: not known to this command") from None


def _int8_caches(file: Path) -> str | None:
    """vllm-ascend: `quantization/modelslim_config.py`."""
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    names = [name for name in ("fa_quant_type", "kv_cache_type") if described.get(name)]
    return f"{names[0]} {described[names[0]]} in {file.name}" if names else None
