# SPDX-License-Identifier: Apache-2.0
"""Program: makes vLLM's and vllm-ascend's configuration of recipes, as `vllm serve` does before it starts an engine.

Arguments: vllm-ascend's version, and numbers of its recipes. Prints a line of JSON for each: its number, and why it is
refused, or null if it is not, or if the guide's own command is refused with the same words.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from harness.models import inspect_here
from harness.recipes import Recipe, make_draft, make_model, recipes
from harness.serve_options import serve_parser
from vllm_ascend_pd.connector.unsupported import unsupported

FRONT_END = ("--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice", "--tokenizer-mode")
"""Options that need a tokenizer, which the models here lack."""


def refused(recipe: Recipe, command: list[list[str]], parser: Any) -> str | None:
    """Returns why vLLM, vllm-ascend or this connector refuse a command."""
    try:
        config = configured(recipe, command, parser)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any of them is what is looked for
        if os.environ.get("TRACE"):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return unsupported(config)


def configured(recipe: Recipe, command: list[list[str]], parser: Any) -> Any:
    """Returns vLLM's configuration for a command."""
    from vllm_ascend.ascend_config import clear_ascend_config

    inspect_here()
    clear_ascend_config()
    before = dict(os.environ)
    options = {words[0]: words[1:] for words in command[1:] if words[0] not in FRONT_END}
    with tempfile.TemporaryDirectory() as folder:
        make_model(recipe.architecture, Path(folder))
        os.environ.update({n: v for n, v in recipe.arguments().environment.items() if n.startswith("VLLM_ASCEND_")})
        try:
            if (draft := json.loads(options.get("--speculative-config", ["{}"])[0])).get("model"):
                draft["model"] = make_draft(recipe.architecture, Path(folder))
                options["--speculative-config"] = [json.dumps(draft)]
            words = [word for name, values in options.items() for word in (name, *values)]
            arguments = parser.parse_args([*words, "--model", folder, "--skip-tokenizer-init"])
            return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        finally:
            os.environ.clear()
            os.environ.update(before)


def stand_in_for_ucm() -> None:
    """UCM is not installed here. vLLM only loads the class, to ask what it supports."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    module = types.ModuleType("ucm.integration.vllm.ucm_connector")
    module.UCMConnector = type("UCMConnector", (KVConnectorBase_V1,), {})  # type: ignore[attr-defined]
    for name in ("ucm", "ucm.integration", "ucm.integration.vllm"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[module.__name__] = module


def main() -> None:
    stand_in_for_ucm()
    parser = serve_parser()
    version, *numbers = sys.argv[1:]
    by_number = {recipe.number: recipe for recipe in recipes(version)}
    for number in map(int, numbers):
        recipe = by_number[number]
        why = refused(recipe, recipe.migrated.command, parser)
        if why is not None and refused(recipe, recipe.arguments().words(), parser) == why:
            print(f"recipe {number} does not run at all: {why}", file=sys.stderr)
            why = None
        print(json.dumps([number, why]), flush=True)


if __name__ == "__main__":
    main()
