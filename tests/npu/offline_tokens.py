# SPDX-License-Identifier: Apache-2.0
"""Prints the greedy tokens of one offline vLLM engine as JSON: `offline_tokens.py MODEL TP PP`."""

import json
import sys

PROMPTS = [[5 + i * step % 400 for i in range(length)] for step, length in ((1, 100), (3, 37), (7, 300), (11, 5))]
"""One of them longer than a step's tokens, below: it is prefilled in chunks."""


def main(model: str, tp: int, pp: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    on_npu = current_platform.device_type == "npu"
    llm = LLM(
        model,
        dtype="float32",
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
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    # Twice: the second time the prefix cache has them.
    rounds = [llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False) for _ in range(2)]
    tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds]
    print("RESULT", json.dumps({"device": current_platform.device_type, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
