# SPDX-License-Identifier: Apache-2.0
"""vLLM's routes that the proxy serves: those whose prompts prefill computes, and those that decode answers alone.

Prefill can compute a route's prompts if its requests take `kv_transfer_params`, and if the proxy's request determines
the engine's id of it. docs/routes.md lists all routes.
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
DECODE_COMPUTES = ("/generative_scoring", "/v1/systemone")
"""These compute a prompt and at most one token, which decode does itself. The others compute nothing."""
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
    *DECODE_COMPUTES,
)
NOT_SERVED: Mapping[str, str] = {
    "/v1/responses/{response_id}": "responses are not stored",
    "/v1/responses/{response_id}/cancel": "responses are not stored, and none runs in the background",
    "/v1/audio/transcriptions": "sound has no separate prefill: ask an engine itself",
    "/v1/audio/translations": "sound has no separate prefill: ask an engine itself",
}
"""Paths of vLLM that the proxy does not serve, and the reason in its answer."""


@dataclass(frozen=True)
class RequestFormat:
    """The format of one route's requests."""

    engine_id: str
    """A pattern for the engine's id of a request. It contains `UUID`; its group `prompt` is the number of the
    prompt."""
    text: str
    """The field with the prompt."""
    one_token: Mapping[str, bytes]
    """Fields that make prefill generate one token and answer at once."""
    required: frozenset[str] = frozenset()
    """Fields without which decode refuses a request."""
    also_limits: frozenset[str] = frozenset()
    """Further limits of tokens. Prefill gets 1 for each that the client gave."""
    not_for_prefill: frozenset[str] = frozenset()
    """Fields that ask for several tokens, or for details about tokens. Prefill does not get them."""
    beside_tokens: tuple[str, ...] = ("model", "cache_salt", "priority")
    """Fields that prefill gets beside the prompt's token ids, if the client gave them."""
    nested: str | None = None
    """The field that contains the fields of `one_token`, `also_limits` and `not_for_prefill`, except `stream`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields that the proxy refuses unless they are null or false, and the reasons."""
    id_field: str | None = None
    """The body's field that gives the engine's id. None: the X-Request-Id header does."""
    breaks_off: bool = False
    """Whether vLLM closes a stream without an event if its generation fails."""


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
        # After a built-in tool's answer, a second turn is `_1`. The proxy does not have its prompt.
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
        beside_tokens=("model", "cache_salt"),  # this route has no priority
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
# vLLM adds the number of each of n samples; our decode engines leave it out.
_SAMPLE = "(?P<sample>[0-9]{1,6}_)?"
_ENGINE_IDS = {endpoint: re.compile(_SAMPLE + each.engine_id) for endpoint, each in REQUEST_FORMATS.items()}


def uuid_in(engine_id: str) -> str:
    """Returns the proxy's id within an engine's id of a request; "" if there is none."""
    found = _UUID.search(engine_id) if len(engine_id) < 200 else None
    return "" if found is None else found[0]


def prompt_number(endpoint: Endpoint, engine_id: str) -> tuple[int, bool] | None:
    """Returns the number of the prompt that `engine_id` stands for, and whether it is one of several samples. None: no
    request to `endpoint` has such an id."""
    found = _ENGINE_IDS[endpoint].fullmatch(engine_id)
    return None if found is None else (int(found["prompt"] or 0), found["sample"] is not None)


def error_event(path: str, error: bytes) -> bytes:
    """Returns `error`, the body of an answer, as an event of a stream of route `path`."""
    if path != Endpoint.MESSAGES.value:
        return b"data: " + error + b"\n\n"
    # Clients of this route ignore events without a name.
    try:
        fields = msgspec.json.decode(error)["error"]
        said = {"type": str(fields["type"]), "message": str(fields["message"])}
    except (*UNREADABLE, KeyError, TypeError):
        said = {"type": "api_error", "message": "the engine failed"}
    return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": said}) + b"\n\n"
