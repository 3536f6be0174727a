# SPDX-License-Identifier: Apache-2.0
"""Compares what `vllm_ascend_pd/connector` uses with the vLLM on PYTHONPATH. Prints JSON, which a test reads.

`imports`: names that it imports, in functions and for types, too. `hooks`: hooks of the connector that vLLM would call
with arguments that they do not take. `inherited`: hooks of vLLM's base class that the connector leaves as they are.
`decode`: the error of a decode engine's patches, or null.
"""

import ast
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import vllm_ascend_pd.connector
from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.patches import install_for_decode_scheduler
from vllm_ascend_pd.core.config import ConfigError

IN_A_SETTING_NOW = "VLLM_MM_HASHER_ALGORITHM"
"""`connector/model.py` reads it only where vLLM's multimodal settings have no `mm_hasher_algorithm`."""


def missing_imports() -> list[str]:
    missing, known = [], {*envs.environment_variables, *vars(envs), IN_A_SETTING_NOW}
    for path in sorted(Path(vllm_ascend_pd.connector.__file__).parent.rglob("*.py")):
        if "vllm_0_" in path.name:
            continue  # a patch, whose own rule says which vLLM it fits
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                missing += [
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not _has(str(node.module), alias.name)
                ]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "envs":
                missing += [] if node.attr in known else [f"{path.name}: vllm.envs.{node.attr}"]
    return missing


def _has(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def _hooks(cls: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def misfits() -> list[str]:
    found, base = [], _hooks(KVConnectorBase_V1)
    for name, hook in _hooks(LayerwisePushConnector).items():
        if name not in base or hook is base[name]:
            continue
        try:
            for given in inspect.signature(base[name]).parameters.values():
                ours = inspect.signature(hook).parameters
                if given.kind in (given.VAR_KEYWORD, given.VAR_POSITIONAL) or given.name in ours:
                    continue
                if not any(each.kind is each.VAR_KEYWORD for each in ours.values()):
                    found.append(f"{name}: {given.name}")
        except ValueError as error:
            found.append(f"{name}: {error}")
    return found


def inherited() -> list[str]:
    ours = _hooks(LayerwisePushConnector)
    base = _hooks(KVConnectorBase_V1)
    return sorted(
        name
        for name, hook in base.items()
        if getattr(ours[name], "__func__", ours[name]) is getattr(hook, "__func__", hook)
    )


def decode_error() -> str | None:
    try:
        install_for_decode_scheduler()
    except ConfigError as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "abstract": sorted(LayerwisePushConnector.__abstractmethods__),
                "imports": missing_imports(),
                "hooks": misfits(),
                "inherited": inherited(),
                "decode": decode_error(),
            }
        )
    )
