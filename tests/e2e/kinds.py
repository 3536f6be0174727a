# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests that a client may send: what `right_kinds.py` and `wrong_kinds.py` make their tables of.

A table's key names the kind, its value has the fields that make it. `kinds` adds the fields that all of a table have in
common; the value `...` takes such a field away. Most prompts are unlike all others from their first words on.
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
NAMED = {"type": "function", "function": {"name": "layer"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "layer", "schema": LAYER}}
CALL = r'<tool_call>\n\{"name": "layer", "arguments": \{"layer": [0-9], "kind": "full"\}\}\n</tool_call>'
GRAMMAR = 'root ::= "layer " [0-9] " is " ("full" | "sliding")'
CALLED = {"id": "call-1", "type": "function", "function": {"name": "layer", "arguments": '{"layer": 3}'}}
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
    stream: dict[str, Any] | None = None,
    times: int = 1,
    transfers: bool = False,
) -> dict[str, Kind]:
    """A table's kinds; `stream`: fields that make each of it once more, as a stream."""
    made = {}
    for suffix, more in (("", {}), *([(", as a stream", stream)] if stream else [])):
        for what, own in table.items():
            name = f"{_NAMES[path]}: {what}{suffix}"
            fields = common(name) | more | own
            body = {key: value for key, value in fields.items() if value is not ...}
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
