# SPDX-License-Identifier: Apache-2.0
"""Prints what a dummy batch does while a request runs, as JSON: `offline_dummy_batch.py MODEL`.

A data-parallel rank without work runs such batches, so that the collectives of others complete.
"""

import json
import os
import sys
from typing import Any

PROMPT_TOKENS = 100


def main(model: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        block_size=128,
        additional_config={"weight_nz_mode": 0},
    )
    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    engine.add_request("running", {"prompt_token_ids": list(range(5, 5 + PROMPT_TOKENS))}, sampling)
    engine.step()
    engine.step()
    [seen] = llm.collective_rpc(dummy_batch)
    print("RESULT", json.dumps(seen))


def dummy_batch(worker: Any) -> dict[str, Any]:
    """The slots before the batch and where its attention metadata is built, and whether KV caches stay as they are."""
    runner = worker.model_runner
    tokens = runner.decode_token_per_req
    build = runner._build_attention_metadata
    built: list[list[int]] = []

    def slots() -> list[int]:
        groups = range(len(runner.kv_cache_config.kv_cache_groups))
        return [
            slot
            for group in groups
            for slot in runner.input_batch.block_table[group].slot_mapping.gpu[:tokens].tolist()
        ]

    def recording(*args: Any, **options: Any) -> Any:
        built.append(slots())
        return build(*args, **options)

    caches = [part for cache in runner.kv_caches for part in (cache if isinstance(cache, tuple | list) else [cache])]
    copies = [cache.clone() for cache in caches]
    before = slots()
    runner._build_attention_metadata = recording
    # As `execute_dummy_batch` calls it; attention is forced, as full graphs do.
    runner._dummy_run(num_tokens=tokens, uniform_decode=True, force_attention=True)
    return {
        "before": before,
        "built": built,
        "unchanged": all(bool((cache == copy).all()) for cache, copy in zip(caches, copies, strict=True)),
        "written": any(bool(copy.any()) for copy in copies),
    }


if __name__ == "__main__":
    main(sys.argv[1])
