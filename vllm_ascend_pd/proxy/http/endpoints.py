# SPDX-License-Identifier: Apache-2.0
"""vLLM's routes that generate, as far as they differ in what the proxy must know; and those that decode answers alone.

What makes a route's prompts computable by prefill: its requests take `kv_transfer_params`, and what an engine calls
them follows from what the proxy sends. docs/routes.md lists all routes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE

UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Endpoint(enum.Enum):
    """A route whose prompts prefill computes; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    CHAT_BATCH = "/v1/chat/completions/batch"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"


DECODE_ALONE_GET = ("/v1/models", "/tokenizer_info", "/version")
DECODE_ALONE_POST = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
    # They compute a prompt, and one token at most of an answer: decode does that itself.
    "/generative_scoring",
    "/v1/systemone",
)
NOT_SERVED: Mapping[str, str] = {
    "/v1/responses/{response_id}": "responses are not stored",
    "/v1/responses/{response_id}/cancel": "responses are not stored, and none runs in the background",
    "/v1/audio/transcriptions": "sound has no separate prefill: ask an engine itself",
    "/v1/audio/translations": "sound has no separate prefill: ask an engine itself",
}
"""Paths of vLLM's that would be of use, and why they are not served."""


@dataclass(frozen=True)
class RequestFormat:
    """What one route's requests look like."""

    engine_id: str
    """A pattern for what an engine calls a request, with `UUID` in it; group `prompt`: the number of its prompt."""
    text: str
    """The field that has the prompt."""
    one_token: Mapping[str, bytes]
    """What makes prefill generate one token, and answer at once."""
    required: frozenset[str] = frozenset()
    """Fields without which decode refuses a request."""
    also_limits: frozenset[str] = frozenset()
    """Further fields that limit tokens: 1 where they are given."""
    not_for_prefill: frozenset[str] = frozenset()
    """Fields that ask for more than a token, or for more about it."""
    beside_tokens: tuple[str, ...] = ("model", "cache_salt", "priority")
    """Fields that prefill gets beside the prompt's token ids, where the client has given them."""
    nested: str | None = None
    """The field that holds those of the three above, but for `stream`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields that do not work here, unless null or false, and why not."""
    id_field: str | None = None
    """The body's field that an engine takes its id from; None: it takes the X-Request-Id."""
    breaks_off: bool = False
    """A stream of which the generation fails inside is broken off: vLLM sends no event about it."""

    def named(self, request_id: str) -> bytes:
        """`id_field`'s value for `request_id`, as JSON."""
        return b'"resp_%s"' % request_id.encode()


_openai_format = partial(
    RequestFormat,
    one_token={"stream": b"false", "max_tokens": b"1", "min_tokens": b"1", "n": b"1"},
    also_limits=frozenset({"max_completion_tokens"}),
    not_for_prefill=frozenset(
        {
            "best_of",
            "echo",
            "logprobs",
            "logprob_token_ids",
            "prompt_logprobs",
            "return_prompt_text",
            "return_token_ids",
            "stream_options",
            "top_logprobs",
            "use_beam_search",
        }
    ),
)
_NO_STORE = "responses are not stored, by this proxy or between engines"

REQUEST_FORMATS: Mapping[Endpoint, RequestFormat] = {
    Endpoint.COMPLETIONS: _openai_format(
        engine_id=f"cmpl-{UUID}-(?P<prompt>[0-9]{{1,6}})",
        text="prompt",
    ),
    Endpoint.CHAT: _openai_format(
        engine_id=f"chatcmpl-{UUID}(?P<prompt>)",
        text="messages",
        required=frozenset({"messages"}),
    ),
    Endpoint.CHAT_BATCH: _openai_format(
        engine_id=f"chatcmpl-{UUID}_(?P<prompt>[0-9]{{1,6}})",
        text="messages",
        required=frozenset({"messages"}),
    ),
    Endpoint.RESPONSES: RequestFormat(
        # A second turn, with what a built-in tool answered, is `_1`: nobody here knows its prompt.
        engine_id=f"resp_{UUID}_0(?P<prompt>)",
        text="input",
        required=frozenset({"input"}),
        one_token={"stream": b"false", "max_output_tokens": b"1", "store": b"false"},
        not_for_prefill=frozenset({"background", "enable_response_messages", "include", "top_logprobs"}),
        refused={
            "background": _NO_STORE,
            "previous_response_id": f"{_NO_STORE}: send the conversation as input",
            "request_id": "it is set by the proxy, not by clients",
        },
        id_field="request_id",
        breaks_off=True,
    ),
    Endpoint.MESSAGES: RequestFormat(
        engine_id=f"chatcmpl-{UUID}(?P<prompt>)",
        text="messages",
        required=frozenset({"model", "messages", "max_tokens"}),
        one_token={"stream": b"false", "max_tokens": b"1"},
        beside_tokens=("model", "cache_salt"),  # decode knows no priority here
    ),
    Endpoint.GENERATE: RequestFormat(
        engine_id=f"generate-tokens-{UUID}(?P<prompt>)",
        text="token_ids",
        required=frozenset({"token_ids", "sampling_params"}),
        one_token={"max_tokens": b"1", "min_tokens": b"1", "n": b"1"},
        not_for_prefill=frozenset({"logprobs", "logprob_token_ids", "prompt_logprobs"}),
        nested="sampling_params",
    ),
}

_UUID = re.compile(UUID)
# Of n samples each is named by its number; our decode engines leave it out.
_SAMPLE = "(?P<sample>[0-9]{1,6}_)?"
_ENGINE_IDS = {endpoint: re.compile(_SAMPLE + each.engine_id) for endpoint, each in REQUEST_FORMATS.items()}


def uuid_in(engine_id: str) -> str:
    """The proxy's own id in what an engine calls a request; "" if there is none."""
    found = _UUID.search(engine_id) if len(engine_id) < 200 else None
    return "" if found is None else found[0]


def prompt_number(endpoint: Endpoint, engine_id: str) -> tuple[int, bool] | None:
    """Which of its request's prompts `engine_id` is about, and whether it is one of several samples; None if no
    request to `endpoint` is called that."""
    found = _ENGINE_IDS[endpoint].fullmatch(engine_id)
    return None if found is None else (int(found["prompt"] or 0), found["sample"] is not None)


def error_event(path: str, error: bytes) -> bytes:
    """`error`, the body of an answer, as an event of a stream that `path` answers with."""
    if path != Endpoint.MESSAGES.value:
        return b"data: " + error + b"\n\n"
    # Its clients pass over events without a name.
    try:
        fields = msgspec.json.decode(error)["error"]
        said = {"type": str(fields["type"]), "message": str(fields["message"])}
    except (*UNREADABLE, KeyError, TypeError):
        said = {"type": "api_error", "message": "the engine failed"}
    return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": said}) + b"\n\n"
