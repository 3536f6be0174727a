# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests that are answered with tokens, one line each; `kinds.py` says how lines become requests."""

from typing import Any

from kinds import (
    ASSISTANT,
    BATCH,
    CALL,
    CALLED,
    CHAT,
    COMPLETIONS,
    END_ID,
    FORMAT,
    FUNCTION,
    GENERATE,
    GRAMMAR,
    LAYER,
    MAX_MODEL_LEN,
    MESSAGES,
    NAMED,
    RESPONSES,
    STREAM,
    TOOL,
    about,
    batch_fields,
    chat_fields,
    completion_fields,
    conversation,
    embeddings,
    generate_fields,
    ids,
    kinds,
    message_fields,
    response_fields,
)

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_tokens 1": {"max_tokens": 1},
    "a seed": {"temperature": 1, "seed": 7},
    "a seed of 64 bits": {"temperature": 1, "seed": -(2**63)},
    "a low temperature": {"temperature": 0.3, "seed": 7},
    "a high temperature": {"temperature": 2, "seed": 7},
    "top_p": {"temperature": 1, "seed": 7, "top_p": 0.4},
    "top_k": {"temperature": 1, "seed": 7, "top_k": 5},
    "min_p": {"temperature": 1, "seed": 7, "min_p": 0.1},
    "all of them": {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "n": 2},
    "presence_penalty": {"presence_penalty": 2, "max_tokens": 24},
    "frequency_penalty": {"frequency_penalty": 2, "max_tokens": 24},
    "repetition_penalty": {"repetition_penalty": 1.5, "max_tokens": 24},
    "logit_bias": {"logit_bias": {"50": 100, "60": -100}},
    "two choices": {"temperature": 1, "seed": 7, "n": 2},
    "three choices": {"temperature": 1, "top_k": 1, "n": 3},
    "stop token ids": {"stop_token_ids": [*range(40, 200)], "max_tokens": 24},
    "a stop that never comes": {"stop": "never comes", "max_tokens": 12},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 100}},
    "the end at once": {"logit_bias": {"2": 100}},
    "min_tokens": {"min_tokens": 6, "logit_bias": {"2": 20}},
    "bad_words": {"bad_words": ["th", "a", "e", "o"]},
    "allowed_token_ids": {"allowed_token_ids": [50, 60, 70]},
    "special tokens are kept": {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {"2": 20}},
    "no spaces between special tokens": {"spaces_between_special_tokens": False, "skip_special_tokens": False},
    "a JSON schema": {"response_format": FORMAT, "max_tokens": 64},
    "any JSON object": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "plain text as a format": {"response_format": {"type": "text"}},
    "structured outputs: JSON": {"structured_outputs": {"json": LAYER}, "max_tokens": 64},
    "structured outputs: a regex": {"structured_outputs": {"regex": "layer [0-9]{2}"}, "max_tokens": 24},
    "structured outputs: a choice": {"structured_outputs": {"choice": ["full", "sliding"]}, "max_tokens": 24},
    "structured outputs: a grammar": {"structured_outputs": {"grammar": GRAMMAR}, "max_tokens": 64},
    "return_token_ids": {"return_token_ids": True},
    "a cache salt": {"cache_salt": "salt"},
    "a priority": {"priority": 3},
    "a user": {"user": "someone"},
    "a session": {"session_id": "a session"},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 150},
    "truncated on the right": {"truncate_prompt_tokens": 150, "truncation_side": "right"},
    "fields that nobody knows": {"metadata": {"a": "b"}, "store": True, "unheard_of": [1, {"a": None}]},
    "fields that are null": {"stop": None, "seed": None, "tools": None, "logit_bias": None},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
        "logit_bias": {"50": 100},
    },
    "arguments for extensions": {"vllm_xargs": {"a": 1, "b": ["c"]}},
}
"""Of completions and of chats."""

STOPPED: dict[str, dict[str, Any]] = {
    "a stop string": {"stop": ["a", "e", "i"], "max_tokens": 24},
    "a stop string that is kept": {"stop": ["a", "e"], "include_stop_str_in_output": True, "max_tokens": 24},
}
"""As those, but the front end ends them: the engine's last words, `kv_transfer_params`, come too late."""

COMPLETION: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "logprobs of the chosen token alone": {"logprobs": 0},
    "logprobs of some tokens": {"logprobs": 1, "logprob_token_ids": [50, 60]},
    "tokens as ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "token ids": {"prompt": ids("token ids")},
    "one token id": {"prompt": [77]},
    "a block of token ids": {"prompt": ids("a block", 128)},
    "one more than a block": {"prompt": ids("one more", 129)},
    "several steps' token ids": {"prompt": ids("several steps", 1200)},
    "as long as can be": {"prompt": ids("as long", MAX_MODEL_LEN - 8)},
    # As many cached blocks each: a stream's usage counts those of whichever prompt vLLM answers first.
    "lists of token ids": {"prompt": [ids("list", 140), ids("second list", 200), ids("third list", 250)]},
    "a list of prompts": {"prompt": [about("first of a list"), about("second of a list")]},
    "a list of one prompt": {"prompt": [about("only one of a list")]},
    "a list of prompts, two choices each": {"prompt": [about("x"), about("y")], "n": 2, "temperature": 1, "seed": 3},
    "a list of prompts with echo": {"prompt": [about("first of an echo"), about("second of an echo")], "echo": True},
    "the same prompt twice": {"prompt": [about("twice")] * 2, "max_tokens": 4},
    "a short prompt": {"prompt": "a"},
    "other alphabets": {"prompt": "Schicht für Schicht: 層ごとに 🙂 \u2028 " * 8},
    "no max_tokens": {"max_tokens": ...},
    "max_tokens null": {"max_tokens": None},
    "no special tokens": {"add_special_tokens": False},
    "a suffix that is null": {"suffix": None},
    "stream_interval": {"stream_interval": 4},
    "the model by name": {"model": "kinds"},
    "numbers as strings": {"max_tokens": "4", "temperature": "0", "seed": "7"},
}
COMPLETION_ALONE: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo alone, with logprobs": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "beam search": {"use_beam_search": True, "n": 2, "temperature": 0},
    "continuous usage": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "a stream without usage": {"stream": True},
    "a stream with empty options": {"stream": True, "stream_options": {}},
    "embeddings": {"prompt": ..., "prompt_embeds": embeddings("one")},
    "several embeddings": {"prompt": ..., "prompt_embeds": [embeddings("one of two"), embeddings("the other of two")]},
    "embeddings and a prompt": {"prompt_embeds": [embeddings("with a prompt")]},
}
"""Which have no stream, or nothing but one."""

CHATS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs of the chosen token alone": {"logprobs": True},
    "logprobs of some tokens": {"logprobs": True, "logprob_token_ids": [50, 60]},
    "max_completion_tokens": {"max_tokens": ..., "max_completion_tokens": 5},
    "both limits": {"max_tokens": 3, "max_completion_tokens": 5},
    "no limit": {"max_tokens": ..., "stop": ["a", "e", "i", "o"]},
    "a name for the user": {"messages": [{"role": "user", "name": "someone", "content": about("name")}]},
    "parts of text": {"messages": [{"role": "user", "content": [{"type": "text", "text": about("parts")}]}]},
    "no generation prompt": {"add_generation_prompt": False},
    "goes on with a message": {
        "messages": [*conversation("on"), ASSISTANT],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "goes on with a message and echoes it": {
        "messages": [*conversation("echo"), ASSISTANT],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "echo": True,
    },
    "add_special_tokens": {"add_special_tokens": True},
    "arguments for the template": {"chat_template_kwargs": {"style": "Briefly: "}},
    "a template of its own": {"chat_template": "{% for message in messages %}{{ message.content }}|{% endfor %}"},
    "documents": {"documents": [{"title": "a", "text": about("document")}]},
    "tools that are not called": {"tools": [FUNCTION]},
    "tools and no choice": {"tools": [FUNCTION], "tool_choice": "none"},
    "tools by choice": {
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "structured_outputs": {"regex": CALL},
        "max_tokens": 80,
    },
    "a tool that is required": {"tools": [FUNCTION], "tool_choice": "required", "max_tokens": 64},
    "a tool by name": {"tools": [FUNCTION], "tool_choice": NAMED, "max_tokens": 64},
    "one tool at a time": {
        "tools": [FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 64,
    },
    "a tool's answer": {
        "messages": [
            *conversation("tool"),
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call-1", "content": "full"},
        ],
        "tools": [FUNCTION],
    },
    "reasoning": {
        "chat_template_kwargs": {"thinking": True},
        "allowed_token_ids": [300, 301, END_ID],
        "temperature": 1,
        "seed": 3,
        "max_tokens": 16,
    },
    "reasoning that does not end": {"chat_template_kwargs": {"thinking": True}},
    "reasoning that is left out": {
        "chat_template_kwargs": {"thinking": True},
        "include_reasoning": False,
        "allowed_token_ids": [300, 301, END_ID],
        "temperature": 1,
        "seed": 3,
    },
    "reasoning, then JSON": {
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {str(END_ID): 100},
        "response_format": FORMAT,
        "max_tokens": 64,
    },
    "reasoning_effort": {"reasoning_effort": "low"},
    "a service tier": {"service_tier": "auto"},
    "the model by name": {"model": "kinds"},
}
CHAT_ALONE: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "beam search": {"use_beam_search": True, "n": 2},
    "continuous usage": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "a stream without usage": {"stream": True},
    "return_prompt_text": {"return_prompt_text": True},
}

BATCHES: dict[str, dict[str, Any]] = {
    "two conversations": {},
    "one conversation": {"messages": [conversation("one of a batch")]},
    "a seed": {"temperature": 1, "seed": 7},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "token ids": {"return_token_ids": True},
    "a JSON schema": {"response_format": FORMAT, "max_tokens": 64},
    "max_completion_tokens": {"max_tokens": ..., "max_completion_tokens": 5},
}

RESPONSES_OF: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Answer in one word."},
    "a conversation": {"input": conversation("responses")},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": about("input")}]}]},
    "a seed": {"temperature": 1, "seed": 7, "top_p": 0.9, "top_k": 20},
    "no limit": {"max_output_tokens": ..., "stop": ["a", "e", "i", "o"]},
    "ignore_eos": {"ignore_eos": True},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2},
    "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "a JSON schema": {
        "text": {"format": {"type": "json_schema", "name": "layer", "schema": LAYER, "strict": True}},
        "max_output_tokens": 64,
    },
    "a tool that is required": {
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": "required",
        "max_output_tokens": 64,
    },
    "a tool by name": {
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "layer"},
        "max_output_tokens": 64,
    },
    "a tool's answer": {
        "input": [
            {"role": "user", "content": about("function")},
            {"type": "function_call", "call_id": "call-1", "name": "layer", "arguments": '{"layer": 3}'},
            {"type": "function_call_output", "call_id": "call-1", "output": "full"},
        ]
    },
    "reasoning": {
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {str(END_ID): 12},
        "temperature": 1,
        "seed": 3,
        "max_output_tokens": 24,
    },
    "metadata": {"metadata": {"a": "b"}, "user": "someone", "service_tier": "auto", "prompt_cache_key": "key"},
    "a cache salt": {"cache_salt": "salt"},
    "truncation disabled": {"truncation": "disabled"},
    "not stored": {"store": False},
}

MESSAGES_OF: dict[str, dict[str, Any]] = {
    "text": {},
    "a system prompt": {"system": "Answer in one word."},
    "a system prompt in blocks": {"system": [{"type": "text", "text": "Answer in one word."}]},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": about("blocks")}]}]},
    "sampling": {"temperature": 1, "top_k": 1, "top_p": 0.9},
    "stop sequences": {"stop_sequences": ["a", "e", "i", "o"], "max_tokens": 24},
    "metadata": {"metadata": {"user_id": "someone"}},
    "a cache salt": {"cache_salt": "salt"},
    "several turns": {
        "messages": [
            {"role": "user", "content": about("turns")},
            {"role": "assistant", "content": "Layer 3."},
            {"role": "user", "content": "And then?"},
        ]
    },
    "tools": {"tools": [{"name": "layer", "description": "Says what a layer does.", "input_schema": LAYER}]},
    "a tool that is required": {
        "tools": [{"name": "layer", "input_schema": LAYER}],
        "tool_choice": {"type": "any"},
        "max_tokens": 64,
    },
    "a tool by name": {
        "tools": [{"name": "layer", "input_schema": LAYER}],
        "tool_choice": {"type": "tool", "name": "layer"},
        "max_tokens": 64,
    },
    "a tool's result": {
        "messages": [
            {"role": "user", "content": about("result")},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "layer", "input": {"layer": 3}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "full"}]},
        ],
        "tools": [{"name": "layer", "input_schema": LAYER}],
    },
    "a JSON schema": {"output_config": {"format": {"type": "json_schema", "schema": LAYER}}, "max_tokens": 64},
    "arguments for the template": {"chat_template_kwargs": {"style": "Briefly: "}},
}

GENERATES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "text": {"output_mode": "text"},
    "a seed": generate_fields("generate: a seed", temperature=1, seed=7, top_p=0.9),
    "logprobs": generate_fields("generate: logprobs", logprobs=2),
    "stop token ids": generate_fields("generate: stop", stop_token_ids=[*range(40, 200)], max_tokens=24),
    "penalties": generate_fields("generate: penalties", presence_penalty=1, repetition_penalty=1.3),
    "ignore_eos": generate_fields("generate: eos", ignore_eos=True, min_tokens=8, logit_bias={"2": 50}),
    "structured outputs": generate_fields("generate: structured", structured_outputs={"regex": "[a-d]{6}"}),
    "prompt token ids": {"return_token_ids": True},
    "a cache salt": {"cache_salt": "salt"},
    "a priority": {"priority": 1},
    "a stream": {"stream": True},
    "a stream with usage": STREAM,
}

RIGHT = {
    **kinds(COMPLETIONS, completion_fields, SAMPLING, stream=STREAM, transfers=True),
    **kinds(COMPLETIONS, completion_fields, STOPPED | COMPLETION, stream=STREAM),
    **kinds(COMPLETIONS, completion_fields, COMPLETION_ALONE),
    **kinds(CHAT, chat_fields, SAMPLING, stream=STREAM, transfers=True),
    **kinds(CHAT, chat_fields, STOPPED | CHATS, stream=STREAM),
    **kinds(CHAT, chat_fields, CHAT_ALONE),
    **kinds(BATCH, batch_fields, BATCHES),
    **kinds(RESPONSES, response_fields, RESPONSES_OF, stream={"stream": True}),
    **kinds(MESSAGES, message_fields, MESSAGES_OF, stream={"stream": True}),
    **kinds(GENERATE, generate_fields, GENERATES),
}
"""Requests that a single engine answers with tokens."""

TWICE = {
    **kinds(
        COMPLETIONS, completion_fields, {"asked again": {}, "asked again with a salt": {"cache_salt": "b"}}, times=3
    ),
    **kinds(CHAT, chat_fields, {"asked again": {}, "asked again, as a stream": STREAM}, times=3),
    **kinds(RESPONSES, response_fields, {"asked again": {}}, times=2),
    **kinds(MESSAGES, message_fields, {"asked again": {}, "asked again, as a stream": {"stream": True}}, times=2),
}
"""Requests that find cached blocks when they are sent again."""
