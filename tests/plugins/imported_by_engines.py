# SPDX-License-Identifier: Apache-2.0
"""Imports what `vllm serve` imports, into the process that the tests' engines are forked from (harness/prefork.py).

The garbage collector does not look at it meanwhile, which takes a quarter of the time, nor later: each full collection
in a fork would take 0.4 s of a core and copy 160 MB.
"""

import gc
import importlib

gc.disable()
for _name in (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1",
):
    importlib.import_module(_name)
gc.freeze()
gc.enable()
