# SPDX-License-Identifier: Apache-2.0
"""Prints the greedy tokens of one offline vLLM engine as JSON: `offline_tokens.py MODEL TP PP DTYPE`.

With each token, the log probabilities of the likeliest ones.
"""

import json
import sys
from typing import Any

PROMPTS = [[5 + i * step % 400 for i in range(length)] for step, length in ((1, 100), (3, 37), (7, 300), (11, 5))]
"""One of them longer than a step's tokens, below: it is prefilled in chunks."""


def main(model: str, tp: int, pp: int, dtype: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    on_npu = current_platform.device_type == "npu"
    llm = LLM(
        model,
        dtype=dtype,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        block_size=128,
        # NZ is a memory format of the NPU's matrix unit; it is not emulated.
        **({"additional_config": {"weight_nz_mode": 0}} if on_npu else {}),
    )
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=10)
    # Twice: the second time the prefix cache has them.
    rounds = [llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False) for _ in range(2)]
    answers = [[answer(output.outputs[0]) for output in outputs] for outputs in rounds]
    print("RESULT", json.dumps({"device": current_platform.device_type, "answers": answers}))


def answer(output: Any) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Returns tokens, and at each place other tokens with their log probabilities."""
    listed = [[(token, each.logprob) for token, each in place.items()] for place in output.logprobs]
    return list(output.token_ids), listed


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
