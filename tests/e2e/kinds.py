# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests whose fields the proxy reads, changes or passes on, right and wrong ones.

vLLM's own tests check what else a field may hold. A table's key names the kind, its value has the fields that make it.
`kinds` adds the fields that all of a table have in common; the value `...` takes such a field away. Most prompts are
unlike all others from their first words on.
"""

import base64
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.client import random_prompt
from harness.models import ModelSpec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BATCH = "/v1/chat/completions/batch"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"

THINK, END_OF_THINKING = "<think>", "</think>"
MODEL = ModelSpec(
    "kinds",
    words=(THINK, END_OF_THINKING),
    chat_template=(
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
        "{% for document in documents or [] %}<document>{{ document.text }}</document>{% endfor %}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
        "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ style or '' }}{% if thinking %}<think>{% endif %}{% endif %}"
    ),
)
MAX_MODEL_LEN = 4096
"""Tokens of a prompt and its answer."""
END_ID = MODEL.vocab_size - 1
"""The token `</think>`."""


_NAMES = {
    COMPLETIONS: "completion",
    CHAT: "chat",
    BATCH: "batch",
    RESPONSES: "response",
    MESSAGES: "message",
    GENERATE: "generate",
}


@dataclass(frozen=True)
class Kind:
    """A request. `content` is what is sent; `status` what a single engine answers, where that is fixed."""

    path: str
    content: bytes
    status: int | None = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    method: str = "POST"
    own_words: bool = False
    """The proxy refuses it as an engine does, with another message."""
    times: int = 1
    """How often it is sent; the later ones find cached blocks."""
    transfers: bool = False
    """Prefill computes it, and the answer says so unless it is a stream."""


def about(name: str) -> str:
    """A prompt that is like no other kind's from its first words on; about 250 tokens."""
    return (f"{name}: which layer comes before it, and which one behind? " * 12)[:400]


def ids(name: str, tokens: int = 200) -> list[int]:
    """A prompt of token ids."""
    return random_prompt(tokens, name, MODEL.vocab_size)


def conversation(name: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": about(name)}]


def _schema(**properties: Any) -> dict[str, Any]:
    """Of an object that has these, and nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LAYER = _schema(layer={"type": "integer", "minimum": 0, "maximum": 9}, kind={"enum": ["full", "sliding"]})
TOOL = {"name": "layer", "description": "Says what a layer does.", "parameters": LAYER}
FUNCTION = {"type": "function", "function": TOOL}
FORMAT = {"type": "json_schema", "json_schema": {"name": "layer", "schema": LAYER}}
ASSISTANT = {"role": "assistant", "content": "The layer before it is"}


@functools.cache
def embeddings(name: str, tokens: int = 150) -> str:
    """A prompt of embeddings, as clients send one."""
    import io

    import torch

    generator = torch.Generator().manual_seed(len(name))
    buffer = io.BytesIO()
    torch.save(torch.randn(tokens, MODEL.hidden_size, generator=generator) * MODEL.initializer_range, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def kinds(
    path: str,
    common: Callable[[str], dict[str, Any]],
    table: dict[str, dict[str, Any]],
    *,
    status: int | None = 200,
    times: int = 1,
    transfers: bool = False,
) -> dict[str, Kind]:
    """A table's kinds."""
    made = {}
    for what, own in table.items():
        name = f"{_NAMES[path]}: {what}"
        body = {key: value for key, value in (common(name) | own).items() if value is not ...}
        made[name] = Kind(path, json.dumps(body).encode(), status, times=times, transfers=transfers)
    return made


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def completion_fields(name: str) -> dict[str, Any]:
    return {"prompt": about(name), "max_tokens": 8, "temperature": 0}


def chat_fields(name: str) -> dict[str, Any]:
    return {"messages": conversation(name), "max_tokens": 8, "temperature": 0}


def batch_fields(name: str) -> dict[str, Any]:
    return {"messages": [conversation(name), conversation(f"another {name}")], "max_tokens": 8, "temperature": 0}


def response_fields(name: str) -> dict[str, Any]:
    return {"input": about(name), "max_output_tokens": 8, "temperature": 0}


def message_fields(name: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": about(name)}], "max_tokens": 8, "temperature": 0, "model": "kinds"}


def generate_fields(name: str, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": ids(name), "sampling_params": {"max_tokens": 8, "temperature": 0} | sampling}


SAMPLING: dict[str, dict[str, Any]] = {
    "max_tokens 1": {"max_tokens": 1},
    "a seed": {"temperature": 1, "seed": 7},
    "two choices": {"temperature": 1, "seed": 7, "n": 2},
    "a JSON schema": {"response_format": FORMAT, "max_tokens": 64},
    "return_token_ids": {"return_token_ids": True},
    "a cache salt": {"cache_salt": "salt"},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 150},
    "fields that nobody knows": {"metadata": {"a": "b"}, "store": True, "unheard_of": [1, {"a": None}]},
    "fields that are null": {"stop": None, "seed": None, "tools": None, "logit_bias": None},
}

COMPLETION: dict[str, dict[str, Any]] = {
    "a stop string": {"stop": ["a", "e", "i"], "max_tokens": 24},
    "logprobs": {"logprobs": 3},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "token ids": {"prompt": ids("token ids")},
    "lists of token ids": {"prompt": [ids("list", 140), ids("second list", 200), ids("third list", 250)]},
    "a list of prompts, two choices each": {"prompt": [about("x"), about("y")], "n": 2, "temperature": 1, "seed": 3},
    "a short prompt": {"prompt": "a"},
    "other alphabets": {"prompt": "Schicht für Schicht: 層ごとに 🙂 \u2028 " * 8},
    "no max_tokens": {"max_tokens": ...},
    "numbers as strings": {"max_tokens": "4", "temperature": "0", "seed": "7"},
}
COMPLETION_ALONE: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo alone": {"echo": True, "max_tokens": 0},
    "beam search": {"use_beam_search": True, "n": 2, "temperature": 0},
    "continuous usage": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "embeddings": {"prompt": ..., "prompt_embeds": embeddings("one")},
}
"""Which have no stream, or nothing but one."""

CHATS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "max_completion_tokens": {"max_tokens": ..., "max_completion_tokens": 5},
    "goes on with a message": {
        "messages": [*conversation("on"), ASSISTANT],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "arguments for the template": {"chat_template_kwargs": {"style": "Briefly: "}},
    "a tool that is required": {"tools": [FUNCTION], "tool_choice": "required", "max_tokens": 64},
    "reasoning, then JSON": {
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {str(END_ID): 100},
        "response_format": FORMAT,
        "max_tokens": 64,
    },
}

RESPONSES_OF: dict[str, dict[str, Any]] = {
    "a conversation": {"input": conversation("responses")},
    "no limit": {"max_output_tokens": ..., "stop": ["a", "e", "i", "o"]},
    "a tool that is required": {
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": "required",
        "max_output_tokens": 64,
    },
}

MESSAGES_OF: dict[str, dict[str, Any]] = {
    "a system prompt": {"system": "Answer in one word."},
    "stop sequences": {"stop_sequences": ["a", "e", "i", "o"], "max_tokens": 24},
}

GENERATES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "a stream with usage": STREAM,
    "logprobs": generate_fields("generate: logprobs", logprobs=2),
}

_STREAMED = ("max_tokens 1", "two choices", "return_token_ids")
_STREAMED_CHATS = ("logprobs", "a tool that is required", "reasoning, then JSON")
RIGHT = {
    **kinds(COMPLETIONS, completion_fields, SAMPLING, transfers=True),
    **kinds(COMPLETIONS, completion_fields, {f"{each}, as a stream": SAMPLING[each] | STREAM for each in _STREAMED}),
    **kinds(COMPLETIONS, completion_fields, COMPLETION | COMPLETION_ALONE),
    **kinds(CHAT, chat_fields, {"greedy": {}}, transfers=True),
    **kinds(CHAT, chat_fields, CHATS),
    **kinds(CHAT, chat_fields, {f"{each}, as a stream": CHATS[each] | STREAM for each in _STREAMED_CHATS}),
    **kinds(BATCH, batch_fields, {"two conversations": {}}),
    **kinds(RESPONSES, response_fields, RESPONSES_OF),
    **kinds(MESSAGES, message_fields, MESSAGES_OF),
    **kinds(RESPONSES, response_fields, {"a stream": {"stream": True}}),
    **kinds(MESSAGES, message_fields, {"a stream": {"stream": True}}),
    **kinds(GENERATE, generate_fields, GENERATES),
    **kinds(COMPLETIONS, completion_fields, {"asked again with a salt": {"cache_salt": "b"}}, times=3),
    **kinds(CHAT, chat_fields, {"asked again, as a stream": STREAM}, times=3),
}
"""Requests that a single engine answers with tokens. One that is asked again finds cached blocks."""

ODD_SAMPLING: dict[str, dict[str, Any]] = {
    "unknown model": {"model": "unheard-of"},
    "max_tokens as a word": {"max_tokens": "many"},
    "max_tokens beyond 64 bits": {"max_tokens": 2**70},
    "n beyond all bounds": {"n": 10**6, "temperature": 1},
    "stream as a word": {"stream": "maybe"},
    "stream_options of another type": {"stream": True, "stream_options": 5},
}

ODD_COMPLETIONS: dict[str, dict[str, Any]] = {
    "no prompt": {"prompt": ...},
    "a list of an empty prompt": {"prompt": [""]},
    "text, then token ids": {"prompt": ["a", 5]},
    "a prompt that is too long": {"prompt": ids("too long", MAX_MODEL_LEN + 1)},
    "no tokens": {"max_tokens": 0},
}

ODD_CHATS: dict[str, dict[str, Any]] = {
    "an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,"}}]}]
    },
    "a conversation that is too long": {"messages": [{"role": "user", "content": about("long") * 40}]},
}

_JSON = {"Content-Type": "application/json"}
_HELLO = b'{"prompt": "hello hello", "max_tokens": 2, "temperature": 0}'
_NO_OBJECTS = {
    "nothing": b"",
    "what ends early": b'{"prompt": "hello',
    "a list": b"[" + _HELLO + b"]",
    "a lone surrogate": b'{"prompt": "\\ud800 hello", "max_tokens": 2, "temperature": 0}',
    "NaN": b'{"prompt": "hello nan", "temperature": NaN, "max_tokens": 2}',
}
"""Bodies that are no JSON objects. The proxy refuses them itself, an engine some words later."""
_CONTENTS = {
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "a field twice": b'{"prompt": "hello twice", "max_tokens": 1, "temperature": 0, "max_tokens": 3}',
}
_HEADERS = {
    "text as its type": {"Content-Type": "text/plain"},
    "a rank that is not": {**_JSON, "X-data-parallel-rank": "7"},
}

ODD = {
    **kinds(COMPLETIONS, completion_fields, ODD_SAMPLING | ODD_COMPLETIONS, status=None),
    **kinds(CHAT, chat_fields, ODD_CHATS, status=None),
    **{f"contents: {name}": Kind(COMPLETIONS, content, None) for name, content in _CONTENTS.items()},
    **{f"contents: {name}": Kind(COMPLETIONS, content, 400, own_words=True) for name, content in _NO_OBJECTS.items()},
    **{f"headers: {name}": Kind(COMPLETIONS, _HELLO, None, headers) for name, headers in _HEADERS.items()},
}
"""Requests that a single engine may refuse."""

_COUNTED = b'{"model": "kinds", "messages": [{"role": "user", "content": "layer by layer"}]}'
ALONE = {
    "tokenizing": Kind("/tokenize", b'{"prompt": "layer by layer"}'),
    "what tokens mean": Kind("/detokenize", b'{"tokens": [50, 60, 70]}'),
    "counting tokens": Kind("/v1/messages/count_tokens", _COUNTED),
    "models": Kind("/v1/models", b"", headers={}, method="GET"),
    "models, HEAD": Kind("/v1/models", b"", None, method="HEAD"),
}
"""Requests that decode answers alone."""

KINDS = RIGHT | ODD | ALONE
