# SPDX-License-Identifier: Apache-2.0
"""Reads what matters of the model that an engine serves: its `config.json`, and how its caches are quantized."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_pd.tools.plan.model import CacheDtype, ModelShape, PlanError, read_model

_QUANTIZATION = "quant_model_description.json"  # ModelSlim's, as vllm-ascend reads it


@dataclass(frozen=True)
class ModelFacts:
    shape: ModelShape | None  # None if it cannot be described
    problem: str | None = None  # why not
    int8_caches: str | None = None  # the setting by which vllm-ascend keeps decode's caches in int8


def read_facts(path: str, kv_cache_dtype: str | None) -> ModelFacts:
    """`path`: a folder with config.json, or that file. `kv_cache_dtype`: of the engine."""
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    try:
        return ModelFacts(read_model(file, _dtype(kv_cache_dtype)), int8_caches=_int8_caches(folder / _QUANTIZATION))
    except OSError:
        return ModelFacts(None, f"there is no config.json at {path!r} on this host: give --model FOLDER")
    except PlanError as error:
        return ModelFacts(None, str(error))


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
