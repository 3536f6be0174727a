# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM's parser of `vllm serve`."""

from __future__ import annotations

import argparse
import importlib

_PLACES = (
    "vllm.entrypoints.common.cli_args",  # vLLM 0.33
    "vllm.entrypoints.launchers.cli_args",  # 0.30
    "vllm.entrypoints.openai.cli_args",  # 0.23
)


def serve_parser() -> argparse.ArgumentParser:
    """Returns vLLM's own parser of `vllm serve`. Raises ModuleNotFoundError if this vLLM has it elsewhere."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for place in _PLACES:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            continue
        parser: argparse.ArgumentParser = module.make_arg_parser(FlexibleArgumentParser())
        return parser
    raise ModuleNotFoundError(f"none of {', '.join(_PLACES)}")
