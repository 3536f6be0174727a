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
            with warnings.catch_warnings(), _environment():
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


_WHILE_IT_IS_ASKED = {
    # Keeps torch, which transformers imports, from loading torch_npu: that needs CANN.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # Keeps transformers from saying that there is no torch, which configurations do not need.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    given = {name: os.environ[name] for name in _WHILE_IT_IS_ASKED if name in os.environ}
    os.environ.update(_WHILE_IT_IS_ASKED)
    try:
        yield
    finally:
        for name in _WHILE_IT_IS_ASKED:
            del os.environ[name]
        os.environ.update(given)
