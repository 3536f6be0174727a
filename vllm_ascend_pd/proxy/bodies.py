# SPDX-License-Identifier: Apache-2.0
"""A client's request as the decode engine and the prefill engines get it: JSON in, JSON out.

Only the fields that decide something here are decoded. All others are carried as the bytes they came in, so
nothing is lost or rounded on the way.
"""

from __future__ import annotations

import enum
from http import HTTPStatus

import msgspec

from .errors import RequestRefused

Fields = dict[str, msgspec.Raw]


class Endpoint(enum.Enum):
    """vLLM's two generating endpoints; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class ClientRequest(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    fields: Fields
    """The body's fields without its prompts."""
    prompts: tuple[Fields, ...]
    """One entry per engine request that vLLM makes of the body, in vLLM's order: entry `i` holds the fields
    that give prompt `i` alone. A chat has exactly one."""
    whole_prompt: Fields
    """The prompt fields as the client sent them."""


_FALSE, _ONE = msgspec.Raw(b"false"), msgspec.Raw(b"1")
_NULL = b"null"

# P runs one token per ticket, so that the prompt's KV exists, and nobody reads its answer. What would make P
# produce or return more is dropped; what shapes the prompt (tools, response_format, truncation, ...) stays,
# because P must see exactly D's tokens.
_PREFILL_FIELDS: Fields = {"stream": _FALSE, "max_tokens": _ONE, "min_tokens": _ONE, "n": _ONE}
_NOT_FOR_PREFILL = frozenset(
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
)


def parse_client_request(endpoint: Endpoint, body: bytes) -> ClientRequest:
    """Raises RequestRefused (400) for a body that is no JSON object or cannot be prefilled elsewhere."""
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except msgspec.DecodeError as error:
        raise _bad_request(f"the request body is not a JSON object: {error}") from None
    if _given(fields.pop("kv_transfer_params", None)):
        raise _bad_request("kv_transfer_params is set by the proxy, not by clients", "kv_transfer_params")
    if bytes(fields.get("truncate_prompt_tokens", b"")) == b"-1":
        # vLLM truncates to what max_tokens leaves free, and P has another max_tokens than D: their prompts,
        # hence the KV that P writes into D's blocks, would differ.
        raise _bad_request(
            "truncate_prompt_tokens=-1 does not work with a separate prefill: give a number of tokens",
            "truncate_prompt_tokens",
        )
    if endpoint is Endpoint.CHAT:
        return ClientRequest(endpoint, fields, ({},), {})
    # vLLM takes the prompts of both fields, embeddings first.
    whole: Fields = {name: fields.pop(name) for name in ("prompt_embeds", "prompt") if name in fields}
    prompts = tuple({name: one} for name, value in whole.items() if _given(value) for one in _split(value))
    return ClientRequest(endpoint, fields, prompts, whole)


def decode_body(request: ClientRequest, metaserver_url: str) -> bytes:
    """The client's body, asking D to fetch the prompt's KV through the metaserver."""
    transfer = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": metaserver_url}
    return msgspec.json.encode({**request.fields, **request.whole_prompt, "kv_transfer_params": transfer})


def prefill_body(request: ClientRequest, index: int, ticket: bytes) -> bytes:
    """The body for prompt `index`: one token, no stream, and D's ticket byte for byte."""
    fields = {name: value for name, value in request.fields.items() if name not in _NOT_FOR_PREFILL}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    return msgspec.json.encode(
        {**fields, **_PREFILL_FIELDS, **request.prompts[index], "kv_transfer_params": msgspec.Raw(ticket)}
    )


def _split(prompt: msgspec.Raw) -> list[msgspec.Raw]:
    """`list[str]` and `list[list[int]]` are several prompts; `list[int]` is one, given as token ids."""
    if not bytes(prompt).startswith(b"["):
        return [prompt]
    items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if items and bytes(items[0]).startswith((b'"', b"[")):
        return items
    return [prompt]


def _given(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value) != _NULL


def _bad_request(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param)
