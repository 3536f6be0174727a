# SPDX-License-Identifier: Apache-2.0
"""The options of the installed vLLM's `vllm serve`, one a line. As a program it prints them.

`tools/serve_options.txt` is the output for vLLM 0.23, 0.30 and 0.32, by `sort -u`.
"""

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


def option_lines(parser: argparse.ArgumentParser) -> list[str]:
    """Returns a line per option: how many values it takes, as `nargs` of argparse says it, and its names.

    The first name is a long one.
    """
    found = []
    for action in parser._actions:
        names = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        if names:
            found.append(" ".join(("1" if action.nargs is None else str(action.nargs), *names)))
    return found


if __name__ == "__main__":
    print("\n".join(option_lines(serve_parser())))
