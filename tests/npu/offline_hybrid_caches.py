# SPDX-License-Identifier: Apache-2.0
"""Program: allocates the caches of recipes whose models have linear attention and an MTP layer, and registers them.

vLLM's own code groups the layers, vllm-ascend's allocates and views the tensors, Mooncake registers the memory with
protocol `ascend`. The models' published layer counts are used. No engine is started.

Arguments: numbers of recipes. Prints a line of JSON for each: its number, the layers in each group, the tensors that
attention has for itself, the regions, and why they are refused, or null.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from harness.ascend_caches import allocate_hybrid, hybrid_specs
from harness.recipes import recipes
from offline_recipe_configs import configured
from vllm_ascend_pd.connector.caches import layer_specs
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

LAYERS = {"qwen3.5": 64, "qwen3.5-moe": 60}
"""Every fourth has attention over all tokens."""

BLOCKS = 4


def registered(engine: TransferEngine, config: Any, layers: int) -> tuple[list[int], int, int, str | None]:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    specs = hybrid_specs(config, layers)
    groups = get_kv_cache_groups(config, specs)
    page = next(iter(specs.values())).page_size_bytes
    largest = max(len(group.layer_names) for group in groups)
    caches = get_kv_cache_config_from_groups(config, groups, BLOCKS * page * largest)
    tensors = allocate_hybrid(caches, config, "npu")
    regions = describe(tensors, layer_specs(caches, config), heads_first=False).regions()
    alone = sum(len(tensor.shared_by) == 1 for tensor in caches.kv_cache_tensors)
    refused = None
    try:
        engine.register(regions, of_caches=True)
    except TransferError as error:
        refused = str(error)
    return [len(group.layer_names) for group in groups], alone, len(regions), refused


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    by_number = {recipe.number: recipe for recipe in recipes()}
    torch.npu.set_device(0)
    for number in map(int, sys.argv[1:]):
        recipe = by_number[number]
        config = configured(recipe, recipe.migrated.command, parser)
        engine = TransferEngine("127.0.0.1", "ascend", TransferLimits())
        print(json.dumps([number, *registered(engine, config, LAYERS[recipe.architecture])]), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
