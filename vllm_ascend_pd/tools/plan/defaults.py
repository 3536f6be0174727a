# SPDX-License-Identifier: Apache-2.0
"""Asks the installed transformers for what `config.json` leaves to a model's code."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_ascend_pd.core.text import one_line


def as_transformers(
    text: Mapping[str, Any], model_types: Sequence[str], fields: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns `fields` as transformers has them, and vLLM from there, by the first of these model types that it knows.

    Returns none of them if transformers is missing, knows no such model or refuses the file, and why. Fields that its
    class leaves out are left out.

    text: the text part of `config.json`.
    """
    problems = []
    for model_type in model_types:
        try:
            with warnings.catch_warnings(), _without_npus():
                warnings.simplefilter("ignore")
                importlib.import_module("transformers.utils.logging").set_verbosity_error()
                known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
                if model_type not in known:
                    problems.append(f"it does not know {model_type}")
                    continue
                config = known[model_type]
                config = (getattr(config, "sub_configs", None) or {}).get("text_config", config)
                read = config(**{field: value for field, value in text.items() if field != "model_type"})
                return {field: getattr(read, field) for field in fields if hasattr(read, field)}, []
        except Exception as problem:  # noqa: BLE001 - its checks raise whatever they like
            problems.append(one_line(f"{type(problem).__name__}: {problem}", 200))
    return {}, problems or ["config.json has no model_type"]


@contextlib.contextmanager
def _without_npus() -> Iterator[None]:
    """Keeps torch, which transformers imports, from loading torch_npu: that needs CANN."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    given = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if given is None else {name: given})
