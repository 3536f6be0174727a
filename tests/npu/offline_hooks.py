# SPDX-License-Identifier: Apache-2.0
"""How vllm-ascend calls a connector, for `offline_engines.py`: a model and a role, all in this process."""

from typing import Any

TOKEN, PROMPT_TOKENS, STEP_TOKENS, OUTPUT_TOKENS = 7, 300, 256, 3
"""One prompt that repeats a token, longer than a step."""


def main(model: str, role: str) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    import recording_connector

    mla = "deepseek" in model
    llm = LLM(
        model,
        dtype="bfloat16",
        load_format="dummy" if mla else "auto",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        block_size=64,
        additional_config={"weight_nz_mode": 0},
        kv_transfer_config={
            "kv_connector": "RecordingConnector",
            "kv_connector_module_path": "recording_connector",
            "kv_role": role,
            "engine_id": "an-engine",
        },
    )
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [TOKEN] * PROMPT_TOKENS}], sampling, use_tqdm=False)
    return recording_connector.EVENTS
