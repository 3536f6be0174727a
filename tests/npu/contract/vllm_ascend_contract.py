# SPDX-License-Identifier: Apache-2.0
"""What the contract's tests share: a model's configuration, readers of sources."""

import ast
import importlib
import inspect
import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS = "LayerwisePushConnector"
REQUEST_ID = "cmpl-5b1e0c2e4d3f4f0f8f5a7c9d1e2f3a4b-0-1a2b3c4d"
BLOCK = 128
MLA_CONFIG = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}

LAYERWISE = "vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_layerwise_connector"


def connector_class() -> type:
    from vllm_ascend_pd.connector.connector import LayerwisePushConnector

    return LayerwisePushConnector


def our_hooks() -> set[str]:
    from harness.multi_connector import hooks_of

    return hooks_of(connector_class())


def engine_config(
    model: Path, tp: int = 1, graphs: str | None = None, engine: dict[str, Any] | None = None, **transfer: Any
) -> Any:
    """The configuration as the platform completes and checks it. `graphs`: the mode asked for; None for none; `engine`:
    other arguments of it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = {"kv_connector": OURS, "kv_role": "kv_producer", "engine_id": "an-engine", **transfer}
    additional = {"weight_nz_mode": 0, **transfer.pop("additional_config", {})}
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=graphs is None,
        compilation_config={} if graphs is None else {"cudagraph_mode": graphs},
        max_model_len=512,
        tensor_parallel_size=tp,
        additional_config=additional,
        kv_transfer_config=KVTransferConfig(**transfer),
        **(engine or {}),
    ).create_engine_config()


def cache_config(*specs: Any) -> Any:
    """Returns caches of these kinds; of full attention, if none is given."""
    from harness.connectors import caches_of, full_attention

    return caches_of(*specs or [full_attention(block_size=BLOCK)])


def constants(module: str, method: str, receiver: str | None = None) -> set[str]:
    """The first arguments of all calls `x.method("...")` in a module's source, `x` being named `receiver` if given."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {
        str(call.args[0].value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and (receiver is None or (isinstance(call.func.value, ast.Name) and call.func.value.id == receiver))
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def statements_after(module: str, statement: str) -> list[str]:
    """What follows each occurrence of `statement` in a module's source, "" where nothing does in its block."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is gone"
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    found = []
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list):
                lines = [*(ast.unparse(child) for child in block), ""]
                found += [after for line, after in itertools.pairwise(lines) if line == statement]
    return found
