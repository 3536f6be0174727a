# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM 0.23.0, 0.30.0, 0.32.0 and 0.33.0, and attributes that this package gives to requests."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec

# From 0.30 on a worker reports completions and failed requests in one object. Before, it reports completions, and
# failed blocks beside them.
HAS_TRANSFER_RESULTS = hasattr(base, "KVConnectorTransferResults")

# From 0.30 on vLLM asks the scheduler for statistics in every step. Before, it asks only if a rank has some, be they
# empty.
ASKS_SCHEDULER_FOR_STATS = hasattr(KVConnectorStats, "to_dict")


def prefill_ranks_hold_copies() -> bool:
    """Whether all ranks of prefill context parallelism hold the same KV.

    They do from 0.30 on. In 0.23 they share a request's tokens, so each has memory for its part of the longest
    request. That memory is what this function compares.
    """
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(max_model_len=2))
    one_token = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    return bool(one_token.max_memory_usage_bytes(config) == 2 * one_token.page_size_bytes)


ADAPTER = "digest_of_adapter"
"""Attribute of a request: the digest of its LoRA adapter, once that has been read."""

STEPS_IN_FLIGHT = "steps_in_flight"
"""Attribute of a request on vLLM 0.23: numbers of the steps in flight that compute for it. A patch sets it."""
